"""Rules of weights: their gradients, what they are at first, and what heads of other patterns add."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from polyformer.attention.mechanisms import SigmoidConfig, SoftmaxConfig, TalkingHeadsConfig
from polyformer.attention.patterns import PerHead, Window
from polyformer.core.sequence.context import Context

HEADS, LENGTH, WIDTH = 2, 5, 3


def inputs(key_heads: int = HEADS, length: int = LENGTH) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((1, heads, length, WIDTH) for heads in (HEADS, key_heads, key_heads))
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def mechanism(config: Any) -> Any:
    """In float64, with parameters away from their initial values."""
    torch.manual_seed(1)
    module = config.build(HEADS, WIDTH).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter))
    return module


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "config", [SigmoidConfig(), SigmoidConfig(score_bias=0.3), TalkingHeadsConfig(scale=0.8)], ids=str
)
def test_gradients_are_those_of_differences(config: Any, causal: bool):
    """Of inputs with grouped queries and of parameters, with a window and padding."""
    module, tensors = mechanism(config.with_value(Window(2), "")), inputs(key_heads=1)
    valid = torch.arange(LENGTH)[None] < LENGTH - 1
    context = Context(LENGTH, LENGTH, causal=causal, kv_valid=valid)

    def output(*_: Tensor) -> Tensor:
        return module(*tensors, context, None, None)[0]

    assert torch.autograd.gradcheck(output, (*tensors, *module.parameters()))


def test_the_first_weights_of_sigmoid_attention_sum_to_nearly_1():
    """With scores of 0, each of n keys has the weight 1 / (1 + n)."""
    q, k, v = inputs(length=200)
    y, _ = SigmoidConfig().build(HEADS, WIDTH)(
        0 * q, k, torch.ones_like(v), Context(200, 200, causal=True), None, None
    )
    n = torch.arange(1, 201, dtype=torch.float64)
    torch.testing.assert_close(y, (n / (n + 1)).view(1, 1, -1, 1).expand_as(y))


def test_a_fixed_bias_is_that_of_a_length():
    q, k, v = inputs()
    context = Context(LENGTH, LENGTH)
    results = [
        SigmoidConfig(score_bias=bias).build(HEADS, WIDTH)(q, k, v, context, None, None)[0]
        for bias in (None, -math.log(LENGTH))
    ]
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


def test_talking_heads_begin_as_softmax_attention():
    tensors, context = inputs(), Context(LENGTH, LENGTH, causal=True)
    actual, expected = (
        config.build(HEADS, WIDTH)(*tensors, context, None, None)[0]
        for config in (TalkingHeadsConfig(), SoftmaxConfig())
    )
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_a_pair_that_a_head_does_not_see_adds_nothing_to_others():
    """The first head sees key 0 from the queries 0 and 1 alone, the second head from all."""
    config = TalkingHeadsConfig(pattern=PerHead((Window(1, 0), Window(LENGTH, 0))))
    module, (q, k, v), context = mechanism(config), inputs(), Context(LENGTH, LENGTH, causal=True)
    before, _ = module(q, k, v, context, None, None)
    k[:, 0, 0] += 5.0
    v[:, 0, 0] += 5.0
    after, _ = module(q, k, v, context, None, None)
    assert torch.equal(after[:, :, 2:], before[:, :, 2:])
    assert (after[:, :, 1] != before[:, :, 1]).any(-1).all(), "where both heads see it, they share it"
    k[:, 1, 0] += 5.0
    own, _ = module(q, k, v, context, None, None)
    assert (own[:, 1] != after[:, 1])[:, 2:].any(-1).all(), "the second head has its own score of key 0"
