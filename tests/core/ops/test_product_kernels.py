"""The library for each product: measured, the same result by each, other sizes as their neighbours."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from pairwise import pairwise
from polyformer.core.errors import InputError
from polyformer.core.ops import product_kernels
from polyformer.core.ops import product_kernels as batched_products
from polyformer.core.ops.product_kernels import (
    BATCHED_PRODUCTS,
    PASSES,
    PLAIN,
    PRODUCTS,
    BatchedProducts,
    LayerKernels,
    ProductKernels,
    measure,
    product,
)
from product_choices import EVERY_WAY, choosing


def test_a_size_goes_the_way_of_its_nearest_neighbour():
    kernels = ProductKernels(
        forward={"1x64x64": "blas", "1024x64x64": "onednn"},
        grad_input={"1024x64x64": "onednn_copied"},
        grad_weight={"64x256x1024": "blas", "64x1024x256": "onednn"},
    )
    assert kernels.kernels(8, 64, 64) == LayerKernels("blas", "onednn_copied", "blas")
    assert kernels.kernels(512, 64, 64).forward == "onednn"
    assert kernels.kernels(64, 300, 700).grad_weight == "blas"
    assert kernels.kernels(64, 700, 300).grad_weight == "onednn"


def test_nothing_measured_is_plain_torch():
    assert ProductKernels().kernels(512, 768, 768) == PLAIN


def test_every_pass_is_measured_and_read_again():
    choice = PRODUCTS.measured()
    assert all(getattr(choice, name) for name in PASSES) or not torch.backends.mkldnn.is_available()
    assert {kernel for name in PASSES for kernel in getattr(choice, name).values()} <= set(EVERY_WAY)
    assert ProductKernels.from_dict(choice.to_dict()) == choice


def test_measuring_leaves_generator_and_modes_alone():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        before = torch.get_rng_state()
        with torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
            PRODUCTS.measured()
            assert torch.is_autocast_enabled("cpu")
        assert torch.equal(torch.get_rng_state(), before)


def test_without_onednn_nothing_is_measured(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert measure() == ProductKernels()


@pytest.mark.parametrize("bad", [{"64x64": "blas"}, {"0x64x64": "blas"}, {"ax1x1": "blas"}, {"1x1x1": "mkl"}])
def test_choices_that_cannot_be_read_are_refused(bad):
    with pytest.raises(InputError, match=r"product|forward"):
        ProductKernels(forward=bad)


def test_each_pass_goes_its_own_way(monkeypatch):
    """A gradient may be oneDNN's where the forward product is not."""

    taken: list[tuple[str, str]] = []
    for name in PASSES:
        plain = getattr(product_kernels, name)
        monkeypatch.setattr(
            product_kernels,
            name,
            lambda *inputs, plain=plain, name=name: taken.append((name, inputs[-1])) or plain(*inputs),
        )
    from polyformer.core.ops.linear import linear

    x, weight = torch.randn(6, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    choice = ProductKernels(grad_input={"6x8x5": "onednn_copied"}, grad_weight={"6x8x5": "onednn"})
    with choosing(choice):
        linear(x, weight).sum().backward()
    assert taken == [("forward", "blas"), ("grad_input", "onednn_copied"), ("grad_weight", "onednn")]
    torch.testing.assert_close(x.grad, torch.autograd.grad(F.linear(x, weight).sum(), x)[0])


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
