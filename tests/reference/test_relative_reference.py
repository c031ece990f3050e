"""T5's buckets, ALiBi, Transformer-XL and Shaw against transformers: T5, Bloom, XLNet, Wav2Vec2-BERT.

With the same weights; whole models of T5 are compared in test_families.
"""

import math

import pytest
import torch
from families import same
from torch import Tensor, nn

from polyformer.attention.functional.attend import attend
from polyformer.attention.positions import (
    AlibiConfig,
    Shape,
    ShawConfig,
    Site,
    TransformerXLConfig,
    sinusoids,
)
from polyformer.attention.positions.by_distance import buckets, slopes
from polyformer.core.sequence.context import Context
from polyformer.nn.stack import AttentionConfig, MultiHeadAttention

transformers = pytest.importorskip("transformers")
from transformers.models.bloom import modeling_bloom  # noqa: E402 - after the check
from transformers.models.bloom.modeling_bloom import build_alibi_tensor  # noqa: E402
from transformers.models.t5.modeling_t5 import T5Attention  # noqa: E402
from transformers.models.wav2vec2_bert import modeling_wav2vec2_bert as wav2vec2  # noqa: E402
from transformers.models.xlnet import modeling_xlnet as xlnet  # noqa: E402

from tolerances import Double  # noqa: E402

WIDTH, HEADS, HEAD = 12, 4, 3
SHAPE = Shape(hidden_size=WIDTH, num_heads=HEADS, head_size=HEAD)
SITE = Site(0, lambda x: x, lambda x: x)


def copied(pairs: list[tuple[nn.Module, nn.Module]]) -> None:
    for mine, other in pairs:
        mine.load_state_dict(other.state_dict())


def same_gradients(actual: Tensor, expected: Tensor, pairs: list[tuple[nn.Module, nn.Module]]) -> None:
    actual.sin().sum().backward()
    expected.sin().sum().backward()
    for mine, other in pairs:
        for parameter, two in zip(mine.parameters(), other.parameters(), strict=True):
            assert parameter.grad is not None
            same(parameter.grad, two.grad)


@pytest.mark.parametrize(("count", "furthest"), [(32, 128), (8, 20), (64, 1000)])
@pytest.mark.parametrize("both", [True, False])
def test_t5_buckets(count: int, furthest: int, both: bool):
    distance = torch.arange(-3 * furthest, 3 * furthest)
    expected = T5Attention._relative_position_bucket(-distance, both, count, furthest)
    assert torch.equal(buckets(distance, count, furthest, both), expected)


@pytest.mark.parametrize("heads", [1, 8, 12, 20])
def test_alibi_slopes(heads: int, monkeypatch: pytest.MonkeyPatch):
    """The table of biases that Bloom adds, [H, 1, T]: position times slope."""
    monkeypatch.setattr(modeling_bloom, "torch", Double())
    table = build_alibi_tensor(torch.ones(1, 3, dtype=torch.long), heads, torch.float64)
    same(torch.tensor(slopes(heads), dtype=torch.float64), table[:, 0, 1])


def test_alibi_slopes_of_the_paper():
    """Section 3: 1/2 to 1/256 for 8 heads, 2^(-1/2), 2^(-1), ... for 16; 12 take four of the latter."""
    assert slopes(8) == [2.0**-i for i in range(1, 9)]
    assert slopes(16) == [2.0 ** (-i / 2) for i in range(1, 17)]
    assert slopes(12) == slopes(8) + [2.0 ** (-i / 2) for i in (1, 3, 5, 7)]


@pytest.mark.parametrize("heads", [8, 12])
def test_alibi_in_a_softmax_is_blooms(heads: int, monkeypatch: pytest.MonkeyPatch):
    """Theirs adds slope * j, ours slope * (j - i): one softmax, left padding included."""
    monkeypatch.setattr(modeling_bloom, "torch", Double())
    q, k, v = torch.randn(3, 2, heads, 7, HEAD, dtype=torch.float64)
    valid = torch.tensor([[1] * 7, [0, 0, 1, 1, 1, 1, 1]]).bool()
    table = build_alibi_tensor(valid.long(), heads, torch.float64).view(2, heads, 1, 7)
    scores = q @ k.mT / math.sqrt(HEAD) + table
    seen = torch.ones(7, 7).tril().bool() & valid[:, None, None]
    expected = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v
    context, position = (
        Context(7, 7, causal=True, kv_valid=valid),
        AlibiConfig().build(Shape(hidden_size=1, num_heads=heads)),
    )
    actual = attend(q, k, v, context=context, relative=position.relative(q, k, context, SITE))
    rows = valid[:, None, :, None].expand_as(actual)
    same(actual[rows], expected[rows])


@pytest.mark.parametrize("memory", [0, 5])
def test_xlnets_relative_attention(memory: int):
    """Transformer-XL's scores, in both directions, after a memory; outputs and gradients of u, v, W_R."""
    torch.manual_seed(0)
    config = transformers.XLNetConfig(
        d_model=WIDTH, n_head=HEADS, d_inner=8, n_layer=1, dropout=0.0, vocab_size=5
    )
    theirs = xlnet.XLNetRelativeAttention(config).double()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.5)
    length = 7
    q = torch.randn(length, 2, HEADS, HEAD, dtype=torch.float64)
    k, v = torch.randn(2, memory + length, 2, HEADS, HEAD, dtype=torch.float64)
    waves = sinusoids(torch.arange(memory + length, -length, -1), WIDTH)
    waves = torch.cat([waves[:, ::2], waves[:, 1::2]], -1).unsqueeze(1)  # theirs has all sines first
    built = xlnet.XLNetModel(config).relative_positional_encoding(length, memory + length)
    torch.testing.assert_close(built.double(), waves, rtol=0, atol=1e-5)
    keys = torch.einsum("ibh,hnd->ibnd", waves.expand(-1, 2, -1), theirs.r)
    expected = theirs.rel_attn_core(q, k, v, keys)

    position = TransformerXLConfig().build(SHAPE).double()
    with torch.no_grad():
        position.u[0].copy_(theirs.r_w_bias.view(HEADS, 1, HEAD))
        position.v[0].copy_(theirs.r_r_bias.view(HEADS, 1, HEAD))
        position.projections[0].weight.copy_(ours_from_theirs(theirs.r))
    context, (q, k, v) = Context(length, memory + length), (x.permute(1, 2, 0, 3) for x in (q, k, v))
    rotated, _ = position.rotate(q, k, context, SITE)
    relative = position.relative(rotated, k, context, SITE)
    actual = attend(rotated, k, v, context=context, relative=relative).permute(2, 0, 1, 3)
    same(actual, expected)
    expected.sin().sum().backward()
    actual.sin().sum().backward()
    assert theirs.r.grad is not None
    same(position.u[0].grad.view(HEADS, HEAD), theirs.r_w_bias.grad)
    same(position.v[0].grad.view(HEADS, HEAD), theirs.r_r_bias.grad)
    same(position.projections[0].weight.grad, ours_from_theirs(theirs.r.grad))


def ours_from_theirs(r: Tensor) -> Tensor:
    """[E, H, D] with all sines first to [H D, E] with sines and cosines in turn."""
    return r.flatten(1).T.unflatten(1, (2, -1)).transpose(1, 2).flatten(1)


def test_shaws_keys_in_wav2vec2_bert():
    """Theirs has relative keys alone."""
    torch.manual_seed(0)
    config = transformers.Wav2Vec2BertConfig(
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        attention_dropout=0.0,
        position_embeddings_type="relative_key",
        left_max_position_embeddings=3,
        right_max_position_embeddings=3,
        attn_implementation="eager",
    )
    theirs = wav2vec2.Wav2Vec2BertSelfAttention(config).double()
    ours = MultiHeadAttention(WIDTH, AttentionConfig(num_attention_heads=HEADS)).double()
    position = ShawConfig(clip=3, values=False).build(SHAPE).double()
    pairs = [
        (ours.query, theirs.linear_q),
        (ours.key, theirs.linear_k),
        (ours.value, theirs.linear_v),
        (ours.output, theirs.linear_out),
        (position.keys[0], theirs.distance_embedding),
    ]
    copied(pairs)
    x = torch.randn(2, 9, WIDTH, dtype=torch.float64)
    actual, _ = ours(x, Context(9, 9), position)
    expected, _ = theirs(x)
    same(actual, expected)
    same_gradients(actual, expected, pairs)
