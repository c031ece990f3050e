"""Wirings against their equations, sub-layer by sub-layer."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.core.ops.norms import LayerNormConfig
from polyformer.nn.block import BlockConfig, ParallelConfig, PostNormConfig, PreNormConfig, SandwichConfig


def first(x: Tensor) -> Tensor:
    return x.cos()


def second(x: Tensor) -> Tensor:
    return x * x


def third(x: Tensor) -> Tensor:
    return 2 - x.flip(-1)


def post(x: Tensor, norms: list[torch.nn.Module]) -> Tensor:
    for norm, f in zip(norms, (first, second, third)):
        x = norm(x + f(x))
    return x


def pre(x: Tensor, norms: list[torch.nn.Module]) -> Tensor:
    for norm, f in zip(norms, (first, second, third)):
        x = x + f(norm(x))
    return x


def sandwich(x: Tensor, norms: list[torch.nn.Module]) -> Tensor:
    for before, after, f in zip(norms[:3], norms[3:], (first, second, third)):
        x = x + after(f(before(x)))
    return x


def reordered(x: Tensor, norms: list[torch.nn.Module]) -> Tensor:
    for norm, f in zip(norms, (first, second, third)):
        x = x + norm(f(x))
    return x


def parallel(x: Tensor, norms: list[torch.nn.Module]) -> Tensor:
    n = norms[0](x)
    return x + first(n) + second(n) + third(n)


@pytest.mark.parametrize(
    ("config", "equation", "norms"),
    [
        (PostNormConfig(), post, 3),
        (PreNormConfig(), pre, 3),
        (ParallelConfig(), parallel, 1),
        (SandwichConfig(), sandwich, 6),
        (SandwichConfig(input_norm=False), reordered, 3),
    ],
)
def test_the_equation(config: BlockConfig, equation, norms: int):
    torch.manual_seed(0)
    block = config.build(5, 3, LayerNormConfig(), 0.3).double().eval()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_()
    x = torch.randn(2, 4, 5, dtype=torch.float64)
    own = [module for module in block.modules() if isinstance(module, torch.nn.LayerNorm)]
    assert len(own) == norms
    expected = equation(x, own)
    torch.testing.assert_close(block(x, [first, second, third]), expected, rtol=1e-12, atol=1e-12)
    assert config.normalizes_output == (config.kind == "post")


@pytest.mark.parametrize("config", [PostNormConfig(), PreNormConfig(), ParallelConfig(), SandwichConfig()])
def test_dropout_is_of_the_sub_layers_output(config: BlockConfig):
    """With everything dropped only the residual stream is left."""
    block = config.build(5, 2, LayerNormConfig(), 0.999999999).train()
    x = torch.randn(2, 4, 5)
    left = F.layer_norm(F.layer_norm(x, (5,)), (5,)) if config.kind == "post" else x
    torch.testing.assert_close(block(x, [first, second]), left)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_pre_norm_stays_finite_in_float16_and_changes_nothing_else(dtype: torch.dtype):
    """The sum overflows on its own, and in a sub-layer's float16 beside a stream in float32."""
    x = torch.tensor([[[60000.0, -60000.0, 1.0, 0.0]]], dtype=dtype)
    sublayers = [lambda x: torch.full_like(x, 30000.0), lambda x: x.half() * 1e5]
    wild = PreNormConfig().build(4, 2, LayerNormConfig(), 0.0).to(dtype)
    tame = PreNormConfig(finite=True).build(4, 2, LayerNormConfig(), 0.0).to(dtype)
    assert not wild(x, sublayers).isfinite().all()
    assert tame(x, sublayers).isfinite().all()
    mild = torch.randn(2, 3, 4).to(dtype)
    assert torch.equal(tame(mild, [first, second]), wild(mild, [first, second]))


def test_the_first_layer_may_read_its_input_as_it_is():
    """One norm less in the first layer, none in the others: ModernBERT's wiring."""
    config, norm = PreNormConfig(first_norm=False), LayerNormConfig()
    first, second = (config.for_layer(layer).build(8, 2, norm, 0.0) for layer in (0, 1))
    assert [name for name, _ in first.named_parameters()] == ["norms.1.weight", "norms.1.bias"]
    assert len([*second.parameters()]) == 4
    x = torch.randn(2, 3, 8)
    doubled = first(x, [lambda y: y, torch.zeros_like])
    torch.testing.assert_close(doubled, 2 * x)
    torch.testing.assert_close(first.pre_norm(x), x)
