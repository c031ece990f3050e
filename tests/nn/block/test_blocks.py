"""Blocks: the wirings of a layer, and gates instead of sums."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyformer import create_model
from polyformer.core.errors import InputError
from polyformer.core.ops.norms import LayerNormConfig
from polyformer.nn.block import BlockConfig, ParallelConfig, PostNormConfig, PreNormConfig, SandwichConfig
from polyformer.nn.block.gated import GATES, GatedBlockConfig
from polyformer.nn.block.layer_scale import LayerScale, LayerScaleConfig


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
def test_wirings_are_the_equation(config: BlockConfig, equation, norms: int):
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


def test_layer_scale_multiplies_what_sub_layers_add():
    torch.manual_seed(0)
    block: Any = LayerScaleConfig(initial_scale=0.3).build(5, 3, LayerNormConfig(), 0.3).eval()
    assert all(torch.equal(scale, torch.full_like(scale, 0.3)) for scale in block.scales)
    block.double()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_()
    x = expected = torch.randn(2, 4, 5, dtype=torch.float64)
    for norm, scale, f in zip(block.norms, block.scales, (first, second, third)):
        expected = expected + scale * f(norm(expected))
    actual = block(x, [first, second, third])
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    own = [*block.parameters()]
    slopes = (torch.autograd.grad(y.square().sum(), own, retain_graph=True) for y in (actual, expected))
    for a, b in zip(*slopes, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_rows_skip_sub_layers_by_chance():
    """All of a row's tokens, in training; what is left is larger, so that the mean stays."""
    torch.manual_seed(0)
    config = LayerScaleConfig(initial_scale=1.0, drop_path=(0.0, 0.25))
    rates = [config.for_layer(layer).drop_path for layer in range(3)]
    assert rates == [(0.0,), (0.25,), (0.25,)]
    block = config.for_layer(2).build(4, 1, LayerNormConfig(), 0.0)
    x = torch.zeros(4000, 3, 4)
    y = block.train()(x, [torch.ones_like]).detach()
    assert torch.equal(y, y[:, :1, :1].expand_as(y))
    assert {round(float(value), 4) for value in y.unique()} == {0.0, 1.3333}
    assert abs(float(y.mean()) - 1) < 0.03
    assert torch.equal(block.eval()(x, [torch.ones_like]), torch.ones_like(x))
    assert type(config.for_layer(0).build(4, 1, LayerNormConfig(), 0.0)) is LayerScale


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
def test_gates_are_the_equation_with_its_gradients(gate: str):
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
def test_a_gate_of_large_bias_is_the_identity_and_of_two_near_it(gate: str):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    moved = {}
    for bias in (0.0, 2.0, 40.0):
        block = GatedBlockConfig(gate=gate, gate_bias=bias).build(8, 1, LayerNormConfig(), 0.0).double()
        moved[bias] = (block(x, [torch.cos]) - x).norm() / x.norm()
    assert moved[40.0] < 1e-12
    assert moved[2.0] < 0.5 * moved[0.0]
    assert moved[2.0] < 0.25


def test_a_new_gated_model_is_near_the_identity_in_every_layer():
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
