"""The gates of GTrXL against their equations, and how near to the identity they begin."""

import pytest
import torch
from torch import Tensor, nn

from polyformer import create_model
from polyformer.core.errors import InputError
from polyformer.core.ops.norms import LayerNormConfig
from polyformer.nn.block.gated import GATES, GatedBlockConfig


def equation(gate: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Each gate written out in its matrices, in the order in which they were made."""
    w = [p for p in gate.parameters() if p.ndim == 2]
    b = next((p for p in gate.parameters() if p.ndim == 1), None)
    name = next(name for name, kind in GATES.items() if type(gate) is kind)
    if name == "residual":
        return x + y
    if name == "input":
        return torch.sigmoid(x @ w[0].T) * x + y
    assert b is not None
    if name == "output":
        return x + torch.sigmoid(x @ w[0].T - b) * y
    if name == "highway":
        s = torch.sigmoid(x @ w[0].T + b)
        return s * x + (1 - s) * y
    if name == "sigmoid_tanh":
        return x + torch.sigmoid(y @ w[0].T - b) * torch.tanh(y @ w[1].T)
    r = torch.sigmoid(y @ w[0].T + x @ w[3].T)
    z = torch.sigmoid(y @ w[1].T + x @ w[4].T - b)
    return (1 - z) * x + z * torch.tanh(y @ w[2].T + (r * x) @ w[5].T)


@pytest.mark.parametrize("gate", GATES)
def test_the_equation_with_its_gradients(gate: str):
    torch.manual_seed(0)
    block = GatedBlockConfig(gate=gate).build(5, 2, LayerNormConfig(), 0.0).double()
    for parameter in block.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    expected = x
    for norm, module, f in zip(block.norms, block.gates, (torch.cos, torch.sin)):
        expected = equation(module, expected, f(norm(expected)).relu())
    y = block(x, [torch.cos, torch.sin])
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    weights = [x, *block.parameters()]
    ours, theirs = (torch.autograd.grad(out.sin().sum(), weights) for out in (y, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("gate", ["output", "highway", "sigmoid_tanh", "gru"])
def test_a_large_bias_makes_it_the_identity_and_two_is_near_it(gate: str):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    moved = {}
    for bias in (0.0, 2.0, 40.0):
        block = GatedBlockConfig(gate=gate, gate_bias=bias).build(8, 1, LayerNormConfig(), 0.0).double()
        moved[bias] = (block(x, [torch.cos]) - x).norm() / x.norm()
    assert moved[40.0] < 1e-12
    assert moved[2.0] < 0.5 * moved[0.0]
    assert moved[2.0] < 0.25


def test_a_new_model_is_near_the_identity_in_every_layer():
    """As of the whole stack: b is not set back by the initial weights."""
    torch.manual_seed(0)
    model = create_model("decoder-tiny", vocab_size=11, block="gated(gate='gru', gate_bias=2.0)").eval()
    block = model.get_submodule("decoder.layers.0.block")
    assert torch.equal(block.get_parameter("gates.1.closed"), torch.full((model.config.hidden_size,), 2.0))


def test_bad_gates_are_refused():
    with pytest.raises(InputError, match="gate 'lstm'"):
        GatedBlockConfig(gate="lstm")
    with pytest.raises(InputError, match="gate_bias: expected a finite number, got nan"):
        GatedBlockConfig(gate_bias=float("nan"))
