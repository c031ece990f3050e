"""Reversible layers: the gradients of stored activations, with dropout, auxiliary losses and autocast."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from polyformer.attention.mechanisms import AdaptiveSpanConfig
from polyformer.attention.positions import LearnedPerLayerConfig, NoPositionConfig, T5BiasConfig
from polyformer.core.errors import InputError
from polyformer.core.ops.layers import collect_auxiliary_losses
from polyformer.core.ops.norms import LayerNormConfig
from polyformer.core.sequence.context import Context
from polyformer.models.presets import model_config
from polyformer.nn.block import ReversibleConfig
from polyformer.nn.feedforward import DenseConfig, ExpertsConfig
from polyformer.nn.heads import EnhancedMaskedConfig
from polyformer.nn.stack import AttentionConfig, Source, Stack, StackConfig, build_stack

WIDTH = 8
SPANS = AdaptiveSpanConfig(max_span=4, ramp=2, initial=0.3, penalty=0.1, dropout=0.2)
EXPERTS = ExpertsConfig(expert=DenseConfig(intermediate_size=6), experts=3, capacity=0.8, jitter=0.3)


def new_stack(dtype: torch.dtype = torch.float64, cross: bool = False, **options: Any) -> Stack:
    torch.manual_seed(0)
    attention = AttentionConfig(num_attention_heads=2)
    parts = {
        "num_hidden_layers": 4,
        "attention": attention,
        "dropout": 0.3,
        "feedforward": DenseConfig(intermediate_size=12),
        "block": ReversibleConfig(),
        "position": LearnedPerLayerConfig(),
        **options,
    }
    stack = build_stack(StackConfig(**parts), WIDTH, 20, attention if cross else None).to(dtype).train()
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return stack


def run(stack: Stack, stored: bool, cross: bool = False, autocast: bool = False) -> list[Tensor]:
    """Output, auxiliary losses, the next random number, and gradients of inputs and parameters."""
    dtype = next(stack.parameters()).dtype
    torch.manual_seed(1)
    x, hidden = (torch.randn(2, n, WIDTH).to(dtype).requires_grad_() for n in (7, 5))
    source = Source(hidden * 2, Context(7, 5)) if cross else None
    context = Context(7, 7, causal=True)
    casting = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
    with collect_auxiliary_losses() as terms, casting:
        # Whoever collects hidden states needs them stored.
        y, _ = stack(x * 1, torch.arange(7), context, source, collect=[] if stored else None)
    drawn = torch.rand(3)
    value = (y * torch.randn(y.shape).to(y.dtype)).sum() + 100 * sum(terms.values())
    torch.manual_seed(77)
    leaves = [x, *([hidden] if cross else []), *stack.parameters()]
    slopes = torch.autograd.grad(value, leaves, materialize_grads=True)  # layer 0's positions stand below
    return [y, *terms.values(), drawn, torch.rand(3), *slopes]


def assert_near(recomputed: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for actual, wanted in zip(recomputed, expected, strict=True):
        largest = max(1.0, float(wanted.detach().abs().max()))
        torch.testing.assert_close(actual, wanted, rtol=tolerance, atol=tolerance * largest)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-6)])
@pytest.mark.parametrize("cross", [False, True])
def test_gradients_are_those_of_stored_activations(dtype: torch.dtype, tolerance: float, cross: bool):
    """With dropout, cross-attention and positions in every layer; the generator goes on as usual."""
    stack = new_stack(dtype, cross)
    assert_near(run(stack, False, cross), run(stack, True, cross), tolerance)


@pytest.mark.parametrize(
    "options",
    [
        {"position": T5BiasConfig()},
        {"attention": AttentionConfig(num_attention_heads=2, mechanism=SPANS)},
        {"feedforward": EXPERTS},
    ],
    ids=["relative positions", "spans", "experts"],
)
def test_auxiliary_losses_and_shared_parameters_keep_their_gradients(options: dict[str, Any]):
    stack = new_stack(**options)
    assert_near(run(stack, False), run(stack, True), 1e-10)


def test_autocast_is_replayed():
    """The backward pass stands outside of autocast, and computes as inside."""
    stack = new_stack(torch.float32, position=NoPositionConfig(), dropout=0.0)
    recomputed, expected = run(stack, False, autocast=True), run(stack, True, autocast=True)
    exact = run(stack, True)
    assert torch.equal(recomputed[0], expected[0])
    for ours, stored, true in zip(recomputed[3:], expected[3:], exact[3:]):
        distance = (ours - stored).norm()
        assert distance <= 0.1 * (stored - true).norm() + 1e-6 * true.norm(), "far below autocast's own error"


def test_the_inverse_finds_the_inputs():
    """Two equations of the paper, forwards, and solved backwards."""
    block = ReversibleConfig().build(WIDTH, 2, LayerNormConfig(), 0.0).double()
    first: Callable[[Tensor], Tensor] = torch.cos
    second: Callable[[Tensor], Tensor] = torch.square
    x1, x2 = torch.randn(2, 1, 3, WIDTH, dtype=torch.float64)
    y1, y2 = block(torch.stack([x1, x2]), [first, second])
    f, g = block.norms
    torch.testing.assert_close(y1, x1 + first(f(x2)), rtol=0, atol=1e-12)
    torch.testing.assert_close(y2, x2 + second(g(y1)), rtol=0, atol=1e-12)
    back = y2 - second(g(y1))
    torch.testing.assert_close(back, x2, rtol=0, atol=1e-12)
    torch.testing.assert_close(y1 - first(f(back)), x1, rtol=0, atol=1e-12)


def test_a_head_that_runs_the_last_layer_again_is_refused():
    options = {"block": ReversibleConfig(), "head": EnhancedMaskedConfig(), "num_hidden_layers": 2}
    with pytest.raises(InputError, match=r"encoder.block: head '\w+' runs the last layer again.*use 'pre'"):
        model_config("encoder-tiny", options)
