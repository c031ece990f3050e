"""Wirings against their equations, sub-layer by sub-layer."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.block import BlockConfig, ParallelConfig, PostNormConfig, PreNormConfig
from polyformer.core.norms import LayerNormConfig


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


def parallel(x: Tensor, norms: list[torch.nn.Module]) -> Tensor:
    n = norms[0](x)
    return x + first(n) + second(n) + third(n)


@pytest.mark.parametrize(
    ("config", "equation", "norms"),
    [(PostNormConfig(), post, 3), (PreNormConfig(), pre, 3), (ParallelConfig(), parallel, 1)],
)
def test_the_equation(config: BlockConfig, equation, norms: int):
    torch.manual_seed(0)
    block = config.build(5, 3, LayerNormConfig(), 0.3).double().eval()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_()
    x = torch.randn(2, 4, 5, dtype=torch.float64)
    assert len(block.norms) == norms
    expected = equation(x, list(block.norms))
    torch.testing.assert_close(block(x, [first, second, third]), expected, rtol=1e-12, atol=1e-12)
    assert config.normalizes_output == (config.kind == "post")


@pytest.mark.parametrize("config", [PostNormConfig(), PreNormConfig(), ParallelConfig()])
def test_dropout_is_of_the_sub_layers_output(config: BlockConfig):
    """With everything dropped only the residual stream is left."""
    block = config.build(5, 2, LayerNormConfig(), 0.999999999).train()
    x = torch.randn(2, 4, 5)
    left = F.layer_norm(F.layer_norm(x, (5,)), (5,)) if config.kind == "post" else x
    torch.testing.assert_close(block(x, [first, second]), left)
