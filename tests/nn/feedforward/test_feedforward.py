"""Feed-forwards against their equations."""

from itertools import cycle

import pytest
import torch
import torch.nn.functional as F

from polyformer.core.errors import InputError
from polyformer.nn.feedforward import DenseConfig, GatedConfig

ACTIVATIONS = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


@pytest.mark.parametrize(("activation", "bias"), [*zip(ACTIVATIONS, cycle([True, False]))])
def test_dense(activation: str, bias: bool):
    torch.manual_seed(0)
    module = DenseConfig(intermediate_size=7, activation=activation, bias=bias).build(3).double()
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    inner = ACTIVATIONS[activation](F.linear(x, module.up.weight, module.up.bias))
    expected = F.linear(inner, module.down.weight, module.down.bias)
    torch.testing.assert_close(module(x), expected, rtol=1e-12, atol=1e-12)
    assert len(list(module.parameters())) == (4 if bias else 2)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["sigmoid", "gelu", "silu"])
def test_gated(activation: str, bias: bool):
    """GLU, GEGLU and SwiGLU."""
    torch.manual_seed(0)
    module = GatedConfig(intermediate_size=7, activation=activation, bias=bias).build(3).double()
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    gate = ACTIVATIONS[activation](F.linear(x, module.gate.weight, module.gate.bias))
    inner = gate * F.linear(x, module.up.weight, module.up.bias)
    expected = F.linear(inner, module.down.weight, module.down.bias)
    torch.testing.assert_close(module(x), expected, rtol=1e-12, atol=1e-12)
    assert len(list(module.parameters())) == (6 if bias else 3)


def test_the_clamped_gate_of_gpt_oss():
    """The gate has an upper bound, the other projection a bound on both sides; 1 is added to the latter."""
    torch.manual_seed(0)
    config = GatedConfig(intermediate_size=7, activation="quick_gelu", bias=True, clamp=0.4, up_offset=1.0)
    module, x = config.build(3).double(), torch.randn(2, 5, 3, dtype=torch.float64)
    gate = F.linear(x, module.gate.weight, module.gate.bias)
    up = F.linear(x, module.up.weight, module.up.bias)
    limit = torch.tensor(0.4, dtype=torch.float64)
    gate, up = gate.minimum(limit), up.minimum(limit).maximum(-limit)
    inner = (up + 1) * gate * torch.sigmoid(1.702 * gate)
    expected = F.linear(inner, module.down.weight, module.down.bias)
    assert gate.min() < -limit
    assert gate.max() == limit
    torch.testing.assert_close(module(x), expected, rtol=1e-12, atol=1e-12)


def test_what_is_wrong_is_named():
    with pytest.raises(InputError, match="unknown activation 'rleu': did you mean 'relu'"):
        DenseConfig(activation="rleu")
    with pytest.raises(InputError, match="intermediate_size: expected 1 or more, got 0"):
        GatedConfig(intermediate_size=0)
