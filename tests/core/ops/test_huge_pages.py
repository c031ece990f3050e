"""Memory that is asked to lie in huge pages keeps its contents; whoever cannot have them loses nothing."""

import torch

from polyformer.core.ops.cpu import PAGE, use_huge_pages


def test_contents_stay():
    x = torch.randn(3 * PAGE // 4 + 5)
    before = x.clone()
    use_huge_pages(x.data_ptr(), x.nbytes)
    assert torch.equal(x, before)
    x.add_(1)
    assert torch.equal(x, before + 1)


def test_what_is_too_small_or_not_there_is_left_alone():
    x = torch.randn(7)
    use_huge_pages(x.data_ptr(), x.nbytes)
    use_huge_pages(PAGE, 4 * PAGE)  # no memory lies there, which the system says
