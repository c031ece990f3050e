"""Which library computes a product is measured; a size that was not goes the way of its neighbour."""

import pytest
import torch
import torch.nn.functional as F

from polyformer.core.errors import InputError
from polyformer.core.ops import product_kernels
from polyformer.core.ops.product_kernels import PASSES, PLAIN, PRODUCTS, LayerKernels, ProductKernels, measure
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
