"""Rules of weights: their gradients, what they are at first, and what heads of other patterns add."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import polyformer
from polyformer.attention.mechanisms import (
    CopeConfig,
    SelectiveConfig,
    SigmoidConfig,
    SoftmaxConfig,
    TalkingHeadsConfig,
)
from polyformer.attention.mechanisms.weight_rules import CosineConfig
from polyformer.attention.patterns import PerHead, Window
from polyformer.core.errors import InputError
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
    "config",
    [
        *(SigmoidConfig(), SigmoidConfig(score_bias=0.3), TalkingHeadsConfig(scale=0.8)),
        CosineConfig(initial=2.0),
        *(CopeConfig(max_position=2, scale=0.8), SelectiveConfig()),
    ],
    ids=str,
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


@pytest.mark.parametrize("begun", [TalkingHeadsConfig(), CopeConfig()], ids=lambda config: config.kind)
def test_a_rule_with_parameters_begins_as_softmax_attention(begun: Any):
    tensors, context = inputs(), Context(LENGTH, LENGTH, causal=True)
    actual, expected = (
        config.build(HEADS, WIDTH)(*tensors, context, None, None)[0] for config in (begun, SoftmaxConfig())
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


def test_positions_of_cope_count_what_gates_select():
    """Scores of 0 are gates of 1/2: key j of query i has the position (i - j + 1) / 2, at most 2."""
    module = CopeConfig(max_position=2).build(HEADS, WIDTH).double()
    with torch.no_grad():
        module.positions[:, 0] = torch.tensor([0.0, 1.0, 4.0])
    q, k, v = inputs()
    q, k, v = torch.zeros_like(q), torch.zeros_like(k), torch.eye(LENGTH, dtype=torch.float64)
    q[..., 0] = WIDTH**0.5  # so that q . e / sqrt(D) is the entry of e
    values = v.expand(1, HEADS, LENGTH, LENGTH)
    y, _ = module(q, k, values, Context(LENGTH, LENGTH, causal=True), None, None)
    # Positions 2, 2, 1.5, 1 and 0.5 of the last query, from the first key on.
    expected = torch.tensor([4.0, 4.0, 2.5, 1.0, 0.5], dtype=torch.float64).softmax(0)
    torch.testing.assert_close(y[0, 1, -1], expected, rtol=1e-12, atol=1e-12)


def test_a_token_masks_a_key_for_the_queries_after_it():
    """Token 2 finds token 1 useless with the score 6; it, token 0 and the future stay."""
    q, k = (torch.zeros(1, HEADS, LENGTH, WIDTH, dtype=torch.float64) for _ in range(2))
    q[0, 0, 2, 0] = 6.0
    k[0, 0, :, 0] = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0])
    values = torch.eye(LENGTH, dtype=torch.float64).expand(1, HEADS, LENGTH, LENGTH)
    module = SelectiveConfig(scale=1.0).build(HEADS, WIDTH)
    y, _ = module(q, k, values, Context(LENGTH, LENGTH, causal=True), None, None)
    of_second = y[0, 1]  # the head whose own scores are 0
    torch.testing.assert_close(of_second[2, :3], torch.full((3,), 1 / 3, dtype=torch.float64))
    for i in (3, 4):
        expected = torch.zeros(i + 1, dtype=torch.float64)
        expected[1] = -6.0
        torch.testing.assert_close(of_second[i, : i + 1], expected.softmax(0), rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_selective_attention_generates_without_a_cache():
    model = polyformer.create_model(
        "decoder-tiny", vocab_size=50, attention="selective", position="rope"
    ).eval()
    text = ids = torch.randint(3, 50, (1, 6), generator=torch.Generator().manual_seed(2))
    for _ in range(4):
        text = torch.cat([text, model(text).logits[:, -1:].argmax(-1)], 1)
    with pytest.warns(UserWarning, match="selective"):
        generated = model.generate(ids, max_new_tokens=4, eos=[]).sequences
    assert torch.equal(generated, text)


@torch.no_grad()
def test_cosines_are_scaled_by_a_learned_number_of_each_head():
    """Beside the equation pair by pair, with grouped queries; longer vectors change nothing."""
    module, (q, k, v) = mechanism(CosineConfig(initial=3.0)), inputs(key_heads=1)
    context = Context(LENGTH, LENGTH, causal=True)
    expected = torch.zeros_like(q)
    for head in range(HEADS):
        t = float(module.log_scale[head].exp())
        for i in range(LENGTH):
            cosines = [F.cosine_similarity(q[0, head, i], k[0, 0, j], dim=0) for j in range(i + 1)]
            expected[0, head, i] = (t * torch.stack(cosines)).softmax(0) @ v[0, 0, : i + 1]
    for factor in (1.0, 50.0):
        torch.testing.assert_close(module(factor * q, k / factor, v, context, None, None)[0], expected)
    module.log_scale.fill_(math.log(1e6))
    limited = module(q, k, v, context, None, None)[0]
    module.log_scale.fill_(math.log(100.0))
    assert torch.equal(limited, module(q, k, v, context, None, None)[0]), "t is at most 100"
    with pytest.raises(InputError, match="scale: 'cosine' learns it; set initial instead, got 2"):
        CosineConfig(scale=2.0)
