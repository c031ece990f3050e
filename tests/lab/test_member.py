"""What `bench attention` may measure, and how it is written."""

import pytest
import torch

from polyformer.attention.functional.attend import attend
from polyformer.attention.mechanisms import AdaptiveSpanConfig
from polyformer.attention.patterns import Global, Strided, Window
from polyformer.attention.patterns.base import Pattern
from polyformer.attention.positions import AlibiConfig, RopeConfig, T5BiasConfig
from polyformer.core.errors import InputError
from polyformer.core.sequence.context import Context
from polyformer_lab.bench.member import Alone, Member, density


def test_members_are_patterns_mechanisms_and_schemes():
    assert Member.read("Window(4) | Global(1)", 16).pattern == Window(4) | Global(1)
    assert Member.read("Window(4) + alibi", 16).position == AlibiConfig()
    assert Member.read("Window(4)+t5(num_buckets=8)", 16).position == T5BiasConfig(num_buckets=8)
    span = Member.read("adaptive_span(max_span=64, initial=0.5) + rope", 16)
    assert (span.mechanism, span.position) == (AdaptiveSpanConfig(max_span=64, initial=0.5), RopeConfig())
    assert span.pattern is None


def test_sqrt_is_the_root_of_the_length():
    assert Member.read("Window({sqrt}, 0) | Strided({sqrt})", 1000).pattern == Window(32, 0) | Strided(32)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Windw(4)", "unknown mechanism or pattern of members 'Windw': did you mean 'Window'?"),
        ("Window(4) + alibbi", "unknown kind of position scheme 'alibbi': did you mean 'alibi'"),
        ("Window(4) + learned", "'learned' changes a model's input and not its attention"),
        ("adaptive_span(max_span=f())", r"max_span: expected int, got 'f\(\)'"),
        ("adaptive_span(maxspan=3)", "unknown option of members 'maxspan': did you mean 'max_span'"),
        (3, r"members: expected expressions such as 'Window\(256\)', got 3"),
    ],
)
def test_bad_members_are_named(text: str, message: str):
    with pytest.raises(InputError, match=message):
        Member.read(text, 16)


@pytest.mark.parametrize("causal", [False, True])
def test_a_pattern_alone_is_attend(causal: bool):
    q, k, v = (torch.randn(1, 2, 16, 4, dtype=torch.float64) for _ in range(3))
    alone = Alone(Member.read("Window(4)", 16), 16, 2, 4, causal)
    expected = attend(q, k, v, pattern=Window(4), context=Context(16, 16, causal=causal))
    torch.testing.assert_close(alone(q, k, v), expected)


@pytest.mark.parametrize("scheme", ["alibi", "t5", "rope", "transformer_xl", "da"])
def test_schemes_act_and_are_trained(scheme: str):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 16, 4, requires_grad=True) for _ in range(3))
    plain = Alone(Member.read("Window(4)", 16), 16, 2, 4, causal=True)(q, k, v)
    alone = Alone(Member.read(f"Window(4) + {scheme}", 16), 16, 2, 4, causal=True)
    y = alone(q, k, v)
    assert not torch.allclose(y, plain)
    y.square().sum().backward()
    assert all(parameter.grad is not None for parameter in alone.parameters())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("text", ["Window(40)", "Window(7, 2) | Global(3)", "PerHead([Window(3), Full()])"])
def test_density_counts_the_mask(text: str, causal: bool):
    length, heads = 300, 2
    pattern, context = Pattern.from_text(text), Context(300, 300, causal=causal)
    index = torch.arange(length)
    head = torch.arange(heads).view(-1, 1, 1)
    zero = torch.zeros((), dtype=torch.long)
    mask = pattern.allows(context, zero, head, index.view(-1, 1), index).expand(heads, length, length)
    mask = mask & (index.view(-1, 1) >= index) if causal else mask
    assert density(pattern, length, heads, causal) == pytest.approx(float(mask.double().mean()), rel=1e-12)
