"""Norms against their equations."""

import pytest
import torch

from polyformer.core.errors import InputError
from polyformer.core.ops.norms import LayerNormConfig, NormConfig, RMSNormConfig


def randomized(config: NormConfig) -> torch.nn.Module:
    torch.manual_seed(0)
    norm = config.build(5).double()
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_()
    return norm


@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm(bias: bool):
    norm = randomized(LayerNormConfig(eps=0.1, bias=bias))
    x = torch.randn(3, 5, dtype=torch.float64)
    centered = x - x.mean(-1, keepdim=True)
    expected = centered / (centered.square().mean(-1, keepdim=True) + 0.1).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), expected + norm.bias if bias else expected, rtol=1e-12, atol=1e-12)
    assert (norm.bias is not None) == bias


def test_layer_norm_of_equal_numbers_has_finite_gradients_in_float16():
    torch.manual_seed(0)
    x, slope = torch.randn(3, 8), torch.randn(3, 8)
    x[1] = 0  # as at padding, where the loss reads nothing
    slope[1] = 0
    results = []
    for dtype in (torch.float16, torch.float32):
        norm, leaf = LayerNormConfig(eps=1e-12).build(8).to(dtype), x.to(dtype).requires_grad_()
        leaves = [leaf, *norm.parameters()]
        results.append(torch.autograd.grad((norm(leaf) * slope.to(dtype)).sum(), leaves))
    for half, exact in zip(*results):
        torch.testing.assert_close(half.float(), exact, rtol=1e-2, atol=1e-2)


def test_rms_norm():
    norm = randomized(RMSNormConfig(eps=0.1))
    x = torch.randn(3, 5, dtype=torch.float64)
    expected = x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("eps", [0.0, -1.0, float("nan")])
def test_eps_is_checked(eps: float):
    with pytest.raises(InputError, match="eps: expected a number above 0, got"):
        RMSNormConfig(eps=eps)


@pytest.mark.parametrize("shape", [(1, 1, 5), (3, 7, 5), (0, 5)])
def test_rms_norm_without_gradients_is_torchs(shape: tuple[int, ...]):
    norm = randomized(RMSNormConfig(eps=0.1)).float()
    for scale in (1e-3, 1.0, 1e3):
        x = scale * torch.randn(shape)
        kept = x.clone()
        with torch.no_grad():
            torch.testing.assert_close(norm(x), torch.rms_norm(x, (5,), norm.weight, 0.1))
        assert torch.equal(x, kept)
        assert norm(x).requires_grad
