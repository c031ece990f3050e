"""Multi-head attention against its equation: projections, heads, groups, another sequence."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from polyformer.attention.mechanisms import DifferentialConfig, LSHConfig, SoftmaxConfig
from polyformer.attention.patterns import Window
from polyformer.attention.positions import NoPositionConfig, Shape
from polyformer.core.errors import InputError
from polyformer.core.ops.norms import BatchNormConfig, RMSNormConfig
from polyformer.core.sequence.context import Context
from polyformer.nn.stack import AttentionConfig, FeatureAttention, MultiHeadAttention

NO_POSITION = NoPositionConfig().build(Shape(hidden_size=6))


def new_attention(config: AttentionConfig, hidden_size: int = 6) -> MultiHeadAttention:
    torch.manual_seed(0)
    kind = FeatureAttention if config.has_features(0) else MultiHeadAttention
    return kind(hidden_size, config).double().eval()


def test_plain_attention_refuses_features():
    with pytest.raises(InputError, match="build FeatureAttention"):
        MultiHeadAttention(6, AttentionConfig(num_attention_heads=2, output_gate=True))


def normed(x: Tensor, norm: Any) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight."""
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight


def equation(module: MultiHeadAttention, x: Tensor, source: Tensor, causal: bool) -> Tensor:
    """Head by head: softmax(x W_q (s W_k)^T / sqrt(D)) s W_v, joined and projected."""
    config, width = module.config, module.head_size
    assert module.key is not None
    q, k, v = module.query(x), module.key(source), module.value(source)
    if config.qk_norm_of == "projection":
        q, k = normed(q, module.query_norm), normed(k, module.key_norm)
    heads = []
    for head in range(config.num_attention_heads):
        mine = slice(head * width, (head + 1) * width)
        group = head // (config.num_attention_heads // config.kv_heads)
        theirs = slice(group * width, (group + 1) * width)
        own_q, own_k = q[..., mine], k[..., theirs]
        if config.qk_norm is not None and config.qk_norm_of == "head":
            own_q, own_k = normed(own_q, module.query_norm), normed(own_k, module.key_norm)
        scores = own_q @ own_k.transpose(1, 2) / math.sqrt(width)
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        heads.append(scores.softmax(-1) @ v[..., theirs])
    if isinstance(module, FeatureAttention) and module.head_scales is not None:
        heads = [factor * head for factor, head in zip(module.head_scales, heads)]
    y = torch.cat(heads, -1)
    gate = module.output_gate if isinstance(module, FeatureAttention) else None
    return module.output(y if gate is None else y * gate(x).sigmoid())


@pytest.mark.parametrize(
    ("heads", "groups", "options"),
    [
        (1, None, {}),
        (3, None, {"bias": False}),
        (6, 2, {"qk_norm": RMSNormConfig(eps=0.1), "qk_norm_of": "projection"}),
        (3, 1, {"head_size": 5, "qk_norm": RMSNormConfig(eps=0.1), "output_gate": True}),
        (6, 2, {"head_scale": True}),
    ],
    ids=["single", "no-bias", "norm-of-projection", "norm-of-head-gated", "scaled-heads"],
)
def test_the_equation(heads: int, groups: int | None, options: dict[str, Any]):
    module = new_attention(AttentionConfig(num_attention_heads=heads, num_key_value_heads=groups, **options))
    torch.manual_seed(1)
    with torch.no_grad():
        for norm in filter(None, (module.query_norm, module.key_norm)):
            norm.get_parameter("weight").normal_()
        if isinstance(module, FeatureAttention) and module.head_scales is not None:
            assert torch.equal(module.head_scales, torch.ones(heads, dtype=torch.float64))
            module.head_scales.normal_()
    x, source = torch.randn(2, 5, 6, dtype=torch.float64), torch.randn(2, 7, 6, dtype=torch.float64)
    y, state = module(x, Context(5, 5, causal=True), NO_POSITION)
    torch.testing.assert_close(y, equation(module, x, x, causal=True), rtol=1e-12, atol=1e-12)
    assert state is None
    y, projected = module.cross(x, source, Context(5, 7))
    torch.testing.assert_close(y, equation(module, x, source, causal=False), rtol=1e-12, atol=1e-12)
    again, _ = module.cross(x, None, Context(5, 7), projected)
    assert torch.equal(again, y)
    assert projected.keys.shape == (2, groups or heads, 7, module.head_size)


def test_groups_are_shared_heads():
    """With key heads repeated for every query head of their group nothing changes."""
    grouped = new_attention(AttentionConfig(num_attention_heads=6, num_key_value_heads=2), 12)
    plain = new_attention(AttentionConfig(num_attention_heads=6), 12)
    state = grouped.state_dict()
    for name in ("key.weight", "key.bias", "value.weight", "value.bias"):
        state[name] = state[name].unflatten(0, (2, 2)).repeat_interleave(3, 0).flatten(0, 1)
    plain.load_state_dict(state)
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    actual, expected = (module(x, Context(5, 5, causal=True), NO_POSITION)[0] for module in (grouped, plain))
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_another_sequence_is_read_without_a_pattern():
    config = AttentionConfig(num_attention_heads=2, mechanism=SoftmaxConfig(pattern=Window(1), scale=0.3))
    assert config.cross() == AttentionConfig(num_attention_heads=2, mechanism=SoftmaxConfig(scale=0.3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads: expected 1 or more, got 0"),
        (
            {"num_attention_heads": 4, "num_key_value_heads": 3},
            "num_key_value_heads: expected a divisor of the 4 query heads, got 3",
        ),
        (
            {"num_attention_heads": 4, "num_key_value_heads": 0},
            "num_key_value_heads: expected 1 or more, got 0",
        ),
        (
            {"num_attention_heads": 4},
            "num_attention_heads: expected a divisor of hidden_size 6, got 4; or give head_size",
        ),
        (
            {"qk_norm": BatchNormConfig()},
            "qk_norm: expected a norm of each token, such as 'rms', got 'batch'",
        ),
        (
            {"qk_norm": RMSNormConfig(), "mechanism": LSHConfig()},
            "qk_norm: keys of 'lsh' are its queries, expected null, got 'rms'",
        ),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 3, "mechanism": DifferentialConfig()},
            "num_key_value_heads: 'differential' needs a multiple of 2, got 3",
        ),
    ],
)
def test_what_is_wrong_is_named(options: dict[str, Any], message: str):
    with pytest.raises(InputError) as caught:
        MultiHeadAttention(6, AttentionConfig(**options))
    assert str(caught.value) == message
