"""Adaptive and dynamic spans: the paper's equation, layouts that follow the spans, auxiliary losses."""

import dataclasses

import pytest
import torch
from torch import Tensor

from polyformer.attention.functional.backends.tiled.tiles import TileSizes, plan
from polyformer.attention.functional.request import Call, prepare
from polyformer.attention.mechanisms import AdaptiveSpanConfig, DynamicSpanConfig, SoftmaxConfig
from polyformer.attention.mechanisms.spans import AdaptiveSpan, Spans, spans
from polyformer.attention.patterns import Pattern
from polyformer.attention.patterns.layout import count
from polyformer.attention.positions import AlibiConfig, RopeConfig, ShawConfig, T5BiasConfig
from polyformer.core.errors import InputError
from polyformer.core.ops.layers import collect_auxiliary_losses
from polyformer.core.sequence.context import Context
from polyformer.models.architectures import Transformer
from polyformer.models.config import ModelConfig
from polyformer.nn.stack import AttentionConfig, StackConfig


def inputs(length: int, keys: int | None = None) -> list[Tensor]:
    """q, k, v of 2 rows and 3 heads."""
    torch.manual_seed(0)
    lengths = length, keys or length, keys or length
    return [torch.randn(2, 3, length, 5, dtype=torch.float64, requires_grad=True) for length in lengths]


def naive(q: Tensor, k: Tensor, v: Tensor, z: Tensor, ramp: int, most: int, causal: bool) -> Tensor:
    """The equation as it stands: m e^s over its sum, for spans z [B or 1, H, Tq or 1]."""
    queries, keys = q.shape[2], k.shape[2]
    distance = torch.arange(queries).view(-1, 1) + keys - queries - torch.arange(keys)
    seen = ((ramp + z.unsqueeze(-1) - distance.abs()) / ramp).clamp(0, 1)
    seen = seen * (distance.abs() <= most)
    if causal:
        seen = seen * (distance >= 0)
    weights = seen * torch.exp(q @ k.mT / q.shape[3] ** 0.5)
    return weights / weights.sum(-1, keepdim=True) @ v


def adaptive(fractions: list[float], **options) -> AdaptiveSpan:
    mechanism = AdaptiveSpanConfig(**options).build(3, 5)
    mechanism.fraction.data = torch.tensor(fractions, dtype=torch.float64)
    return mechanism


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("length", "keys"), [(13, 13), (151, 151), (5, 140)])
def test_adaptive_spans_are_the_equation(length: int, keys: int, causal: bool):
    """Output and gradients, those of the spans too; one head as narrow and one as wide as can be."""
    q, k, v = tensors = inputs(length, keys)
    mechanism = adaptive([0.0, 0.37, 1.0], max_span=90, ramp=7)
    weight = torch.randn(2, 3, length, 5, dtype=torch.float64)
    z = torch.tensor([0.0, 33.3, 90.0], dtype=torch.float64, requires_grad=True)
    expected = naive(q, k, v, z.view(1, 3, 1), 7, 90, causal)
    slopes = torch.autograd.grad((expected * weight).sum(), [*tensors, z])
    y, _ = mechanism(q, k, v, Context(length, keys, causal=causal), None, None)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-12)
    *actual, fraction = torch.autograd.grad((y * weight).sum(), [*tensors, mechanism.fraction])
    for slope, expected_slope in zip(actual, slopes):
        torch.testing.assert_close(slope, expected_slope, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(fraction[1], slopes[-1][1] * 90, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("length", "keys"), [(13, 13), (151, 151), (5, 140)])
def test_dynamic_spans_are_the_equation(length: int, keys: int, causal: bool):
    q, k, v = tensors = inputs(length, keys)
    mechanism = DynamicSpanConfig(max_span=90, ramp=7, initial=-1.0).build(3, 5).double()
    torch.nn.init.normal_(mechanism.vector)
    parameters = list(mechanism.parameters())
    logits = (tensors[0] * mechanism.vector.unsqueeze(1)).sum(-1) + mechanism.bias.unsqueeze(1)
    z = 90 * torch.sigmoid(logits)
    assert z.max() - z.min() > 60
    weight = torch.randn(2, 3, length, 5, dtype=torch.float64)
    expected = naive(q, k, v, z, 7, 90, causal)
    slopes = torch.autograd.grad((expected * weight).sum(), [*tensors, *parameters])
    y, _ = mechanism(q, k, v, Context(length, keys, causal=causal), None, None)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-12)
    for slope, expected_slope in zip(
        torch.autograd.grad((y * weight).sum(), [*tensors, *parameters]), slopes
    ):
        torch.testing.assert_close(slope, expected_slope, rtol=1e-10, atol=1e-11)


def test_the_mask_of_the_paper():
    """m_z(x) for z = 3, R = 2: full up to 3, a half at 4, nothing from 5 on; read off uniform attention."""
    mechanism = AdaptiveSpanConfig(max_span=6, ramp=2, initial=0.5).build(1, 4).double()
    zeros, values = torch.zeros(1, 1, 8, 4, dtype=torch.float64), torch.eye(8, dtype=torch.float64)
    y, _ = mechanism(zeros, zeros, values.view(1, 1, 8, 8), Context(8, 8, causal=True), None, None)
    assert (y[0, 0, 7] / y[0, 0, 7, 7]).tolist() == [0, 0, 0, 0.5, 1, 1, 1, 1]


def scores(pattern: Pattern, length: int) -> int:
    """Scores that the backend computes for one row, over the heads."""
    q = torch.zeros(1, 3, length, 5)
    context = Context(length, length, causal=True)
    request = prepare(Call(q, q, q, pattern=pattern, context=context))
    limits = request.pattern
    assert limits is not None
    return sum(plan(limits.head_pattern(head), context, 1, TileSizes()).scores for head in range(3))


def test_work_falls_with_adaptive_spans():
    """Heads look as far as their spans and the ramp, rounded up to 64; heads of like spans share a layout."""
    counts = []
    for fractions in ([1.0, 1.0, 1.0], [0.5, 0.5, 0.5], [0.1, 0.12, 1.0], [0.0, 0.0, 0.0]):
        mechanism = adaptive(fractions, max_span=1024, ramp=32)
        counts.append(scores(mechanism._pattern(), 4096))
    assert counts[0] > 1.4 * counts[1] > 1.4 * counts[2] > 1.4 * counts[3]
    assert counts[0] > 3 * counts[3]
    mechanism = adaptive([0.1, 0.12, 1.0], max_span=1024, ramp=32)
    assert mechanism._pattern() == Spans(((192,), (192,), (1024,)))
    assert mechanism._pattern().head_pattern(0) == mechanism._pattern().head_pattern(1)


def test_work_falls_with_dynamic_spans():
    """One far-sighted query widens its own run of 64 and no other."""
    mechanism = DynamicSpanConfig(max_span=1024, ramp=32, initial=-9.0).build(3, 5)
    near = mechanism._pattern(mechanism.spans(torch.zeros(1, 3, 256, 5)))
    assert near == Spans(((64,) * 4,) * 3, 64)
    seeing = torch.zeros(1, 3, 256, 5)
    seeing[0, 1, 130] = 9.0
    mechanism.vector.data.fill_(1.0)
    far = mechanism._pattern(mechanism.spans(seeing))
    assert far == Spans(((64,) * 4, (64, 64, 1024, 64), (64,) * 4), 64)
    assert count(far.keys(Context(256, 256), 0, 64).some) == 128
    assert count(far.head_pattern(1).keys(Context(256, 256), 128, 192).some) == 256


TWO = [
    AdaptiveSpanConfig(max_span=70, ramp=9, initial=0.3),
    DynamicSpanConfig(max_span=70, ramp=9, initial=0.0),
]
POSITIONS = [AlibiConfig(), T5BiasConfig(), RopeConfig(), ShawConfig()]


@pytest.mark.parametrize("position", POSITIONS, ids=lambda config: config.kind)
@pytest.mark.parametrize("config", TWO, ids=lambda config: config.kind)
def test_spans_go_with_every_kind_of_position(config, position):
    """And with full spans they are plain attention."""
    results = []
    whole = {"max_span": 500, "initial": 1.0 if config.kind == "adaptive_span" else 60.0}
    for mechanism in (config, config.definition(), dataclasses.replace(config, **whole), SoftmaxConfig()):
        attention = AttentionConfig(num_attention_heads=2, mechanism=mechanism)
        stack = StackConfig(num_hidden_layers=1, position=position, attention=attention, dropout=0.0)
        torch.manual_seed(0)
        model = Transformer(ModelConfig(vocab_size=11, hidden_size=16, decoder=stack)).double()
        torch.manual_seed(0)
        for parameter in model.tokens.parameters():
            torch.nn.init.normal_(parameter)
        results.append(model.eval()(torch.arange(150).view(1, -1) % 11).last_hidden_state)
    torch.testing.assert_close(results[0], results[1], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(results[2], results[3], rtol=1e-10, atol=1e-12)
    assert (results[0] - results[3]).abs().max() > 1e-3


def test_the_auxiliary_loss_is_on_the_mean_span():
    mechanism = adaptive([0.5, -0.2, 1.5], max_span=10, ramp=2, penalty=0.3)
    with collect_auxiliary_losses() as losses:
        mechanism(*inputs(4), Context(4, 4), None, None)
    wall = (0.2**2 + 0.5**2) / 3
    expected = torch.tensor(0.3 * (5 + 0 + 10) / 3 + wall, dtype=torch.float64)
    torch.testing.assert_close(losses["span"], expected)
    losses["span"].backward()
    # 0.3 * 10 / 3 where the span can shrink; what lies outside is drawn back inside.
    expected = torch.tensor([1.0, -0.4 / 3, 1.0 / 3], dtype=torch.float64)
    torch.testing.assert_close(mechanism.fraction.grad, expected)
    torch.testing.assert_close(mechanism.spans(), torch.tensor([5.0, 0.0, 10.0], dtype=torch.float64))


def test_the_auxiliary_loss_of_dynamic_spans_counts_real_tokens():
    mechanism = DynamicSpanConfig(max_span=10, ramp=2, initial=0.0, penalty=0.3).build(3, 5).double()
    q, k, v = inputs(4)
    torch.nn.init.normal_(mechanism.vector)
    valid = torch.tensor([[True] * 4, [False, True, True, False]])
    with collect_auxiliary_losses() as losses:
        mechanism(q, k, v, Context(4, 4, kv_valid=valid), None, None)
    z = mechanism.spans(q)
    expected = torch.cat([z[0], z[1, :, 1:3]], 1).mean() * 0.3
    torch.testing.assert_close(losses["span"], expected)


def test_training_shrinks_spans_that_nothing_needs():
    """A task that looks at the token itself alone: the auxiliary loss takes the spans to 0, for good."""
    config = AdaptiveSpanConfig(max_span=16, ramp=2, initial=0.9, penalty=0.05)
    attention = AttentionConfig(num_attention_heads=2, mechanism=config)
    stack = StackConfig(num_hidden_layers=1, attention=attention, dropout=0.0)
    torch.manual_seed(0)
    model = Transformer(ModelConfig(vocab_size=7, hidden_size=16, encoder=stack)).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    before = {name: sum(values) for name, values in spans(model).items()}
    assert before == {"encoder.layers.0.attention.mechanism": pytest.approx(2 * 0.9 * 16)}
    for _ in range(30):
        ids = torch.randint(7, (4, 12))
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    for name, values in spans(model).items():
        assert sum(values) < 0.2 * before[name], name


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AdaptiveSpanConfig(max_span=0), "max_span: expected 1 or more, got 0"),
        (lambda: AdaptiveSpanConfig(ramp=0), "ramp: expected 1 or more, got 0"),
        (lambda: AdaptiveSpanConfig(initial=1.5), "initial: expected a number from 0 to 1"),
        (lambda: AdaptiveSpanConfig(penalty=-1.0), "penalty: expected 0 or more"),
        (lambda: DynamicSpanConfig(max_span=0), "max_span: expected 1 or more"),
        (lambda: DynamicSpanConfig(penalty=-1.0), "penalty: expected 0 or more"),
    ],
)
def test_what_cannot_be_is_refused(make, message: str):
    with pytest.raises(InputError, match=message):
        make()
