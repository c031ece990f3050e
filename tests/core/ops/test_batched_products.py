"""Batched products: the same as torch's, and never by oneDNN's slow way."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pairwise import pairwise
from polyformer.core.errors import InputError
from polyformer.core.ops import product_kernels as batched_products
from polyformer.core.ops.product_kernels import BATCHED_PRODUCTS, BatchedProducts, product

HEADS = torch.randn(1, 512, 4, 64, generator=torch.Generator().manual_seed(0)).transpose(1, 2)[0]
"""Heads [4, 512, 64] as a model has them: cut out of [tokens, heads, width], with gaps between the rows."""


class Weights(TorchDispatchMode):
    """Notes the second operands that reach oneDNN."""

    def __init__(self):
        super().__init__()
        self.found: list[torch.Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.mkldnn._linear_pointwise.default:
            self.found.append(args[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("transposed", [True, False])
def test_heads_are_made_dense_before_onednn_takes_them(transposed: bool):
    """It takes rows with gaps by its reference code, 400 times as slow: 440 ms in place of one."""
    a = torch.randn(4, 128 if transposed else 256, 64 if transposed else 512)
    b = HEADS.mT if transposed else HEADS
    with BATCHED_PRODUCTS.using(BatchedProducts(plain=1, transposed=1)), Weights() as weights:
        result = product(a, b)
    torch.testing.assert_close(result, torch.bmm(a, b), rtol=1e-4, atol=1e-3)
    assert len(weights.found) == 4
    assert all(weight.is_contiguous() or weight.mT.is_contiguous() for weight in weights.found)


@pytest.mark.parametrize(("transposed", "number", "into"), pairwise([True, False], [1, 3], [True, False]))
def test_every_way_gives_the_product(transposed: bool, number: int, into: bool):
    torch.manual_seed(0)
    a = torch.randn(number, 7, 5).mT if transposed else torch.randn(number, 5, 7)
    b = torch.randn(number, 7, 3)
    onednn = BatchedProducts(plain=batched_products.NEVER, transposed=1)
    if not transposed:
        onednn = BatchedProducts(plain=1, transposed=batched_products.NEVER)
    for choice, by_onednn in ((onednn, number), (BatchedProducts(), 0)):
        out = torch.empty(number, 5, 3) if into else None
        with BATCHED_PRODUCTS.using(choice), Weights() as weights:
            result = product(a, b, out)
        torch.testing.assert_close(result, a @ b)
        assert len(weights.found) == by_onednn
        assert out is None or result is out


def test_the_measured_choice_is_the_least_size_from_which_onednn_always_wins(monkeypatch: pytest.MonkeyPatch):
    wins = {sizes: sizes[0] == 64 or sizes[1] == 1024 for sizes in batched_products.TILES}
    monkeypatch.setattr(batched_products, "_gain", lambda *sizes, transposed: 2.0 if wins[sizes] else 0.5)
    choice = BATCHED_PRODUCTS.measured()
    assert choice == BatchedProducts(plain=256 * 1024 * 64, transposed=256 * 1024 * 64)
    monkeypatch.setattr(batched_products, "_gain", lambda *sizes, transposed: 1.0)
    assert BATCHED_PRODUCTS.measured().plain == batched_products.NEVER


def test_it_is_measured_with_one_thread_and_leaves_the_number_as_it_was(monkeypatch: pytest.MonkeyPatch):
    seen = []
    monkeypatch.setattr(
        batched_products, "_gain", lambda *sizes, transposed: seen.append(torch.get_num_threads()) or 1
    )
    with batched_products.threads(2):
        BATCHED_PRODUCTS.measured()
        assert torch.get_num_threads() == 2
    assert set(seen) == {1}


def test_a_size_below_one_is_refused():
    with pytest.raises(InputError, match="transposed: expected 1 or more"):
        BatchedProducts(transposed=0)
