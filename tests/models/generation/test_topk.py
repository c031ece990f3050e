"""The largest numbers found among blocks are those found one by one."""

import pytest
import torch

from polyformer.models.generation.processors import BLOCK, MIN_LENGTH, blockwise_argmax, blockwise_topk


@pytest.mark.parametrize(
    "length", [5, MIN_LENGTH - 1, MIN_LENGTH, MIN_LENGTH + 1, MIN_LENGTH + BLOCK - 1, 50257]
)
@pytest.mark.parametrize("rows", [1, 3])
def test_both_are_torchs_own(rows, length):
    x = torch.randn(rows, length, generator=torch.Generator().manual_seed(length))
    for count in (1, 4, 5):
        values, index = x.topk(count)
        assert torch.equal(blockwise_topk(x, count)[0], values)
        assert torch.equal(blockwise_topk(x, count)[1], index)
    assert torch.equal(blockwise_argmax(x), x.argmax(-1))


@pytest.mark.parametrize("place", [0, BLOCK - 1, BLOCK, MIN_LENGTH, MIN_LENGTH + 6])
def test_the_place_may_be_anywhere(place):
    x = torch.zeros(2, MIN_LENGTH + 7)
    x[1, place] = 1.0
    assert blockwise_topk(x, 3)[1][1, 0] == place
    assert blockwise_argmax(x).tolist() == [0, place], "of equals the first"
    x[1, :place] = -torch.inf
    assert blockwise_argmax(x)[1] == place


def test_what_is_forbidden_comes_last():
    x = torch.full((1, MIN_LENGTH + 7), -torch.inf)
    x[0, [3, 4000, MIN_LENGTH + 5]] = torch.tensor([1.0, 3.0, 2.0])
    values, index = blockwise_topk(x, 5)
    assert index[0, :3].tolist() == [4000, MIN_LENGTH + 5, 3]
    assert values[0, 3:].tolist() == [-torch.inf] * 2
    assert len(set(index[0].tolist())) == 5, "no place twice"
