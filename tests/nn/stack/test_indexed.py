"""Attention with an indexer: its equation token by token, its loss, its state, and what it refuses."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import polyformer
from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.patterns import Window
from polyformer.attention.positions import RopeConfig, Shape
from polyformer.attention.positions.base import Position
from polyformer.core.errors import InputError
from polyformer.core.ops.layers import collect_auxiliary_losses
from polyformer.core.sequence.context import Context
from polyformer.models.architectures.context_parallel import check_context_parallel
from polyformer.nn.stack import (
    AttentionConfig,
    IndexedAttention,
    IndexedLatentAttention,
    IndexerConfig,
    LatentConfig,
    MultiHeadAttention,
    StackConfig,
    indexed,
)
from polyformer.nn.stack.indexed import choose, index_scores

HEADS, WIDTH, LENGTH = 2, 4, 9


def new_attention(latent: bool = False, indexer: IndexerConfig | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    indexer = indexer or IndexerConfig(top_k=3, heads=5, size=6)
    sizes = LatentConfig(size=6, query_size=7, rotary_size=4, value_size=5) if latent else None
    config = AttentionConfig(
        num_attention_heads=HEADS, head_size=WIDTH, latent=sizes, indexer=indexer, **options
    )
    module = (IndexedLatentAttention if latent else IndexedAttention)(8, config).double().eval()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return module


def position_of() -> Position:
    return RopeConfig().build(Shape(hidden_size=8, head_size=WIDTH))


def scores_by_hand(module: IndexedAttention, x: Tensor, position: Position) -> Tensor:
    """I_ts = sum_j w_tj ReLU(q_tj . k_s) / sqrt(J D), pair by pair."""
    own, length = module.indexer, x.shape[1]
    context = Context(length, length, causal=True)
    k = own.key_norm(own.key(x))[:, None]
    q = own.query(module._query_input(x)).unflatten(-1, (-1, own.size)).transpose(1, 2)
    q, k = position.rotate(q, k, context, module._site())
    w = own.weights(x)
    result = x.new_zeros(len(x), length, length)
    for b, t, s in itertools.product(range(len(x)), range(length), range(length)):
        for j in range(q.shape[1]):
            dot = (q[b, j, t] * k[b, 0, s]).sum()
            result[b, t, s] += w[b, t, j] * dot.relu() / (q.shape[1] * own.size) ** 0.5
    return result


def plain_weights(module: Any, x: Tensor, position: Position) -> tuple[Tensor, Tensor]:
    """Scores of the attention [B, H, T, T], scaled, and the values of its heads."""
    q, (k, v) = module._queries(x), module.keys_and_values(x)
    q, k = position.rotate(q, k, Context(x.shape[1], x.shape[1], causal=True), module._site())
    return q @ k.mT * q.shape[-1] ** -0.5, v


def equation(module: Any, x: Tensor, position: Position, seen: Tensor) -> Tensor:
    """Attention of every query to the keys in `seen` [B, T, T]."""
    scores, v = plain_weights(module, x, position)
    p = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    return module.output((p @ v).transpose(1, 2).flatten(2))


def largest(scores: Tensor, count: int) -> Tensor:
    """Of the keys up to each query's slot those with the largest scores, one after the other."""
    seen = torch.zeros_like(scores, dtype=torch.bool)
    for b, t in itertools.product(range(len(scores)), range(scores.shape[1])):
        order = sorted(range(t + 1), key=lambda s: (-scores[b, t, s].item(), s))
        seen[b, t, order[:count]] = True
    return seen


@pytest.mark.parametrize("latent", [False, True])
def test_queries_attend_to_the_keys_of_the_largest_scores(latent: bool):
    """Outputs, gradients, and steps after a text."""
    module, position = new_attention(latent), position_of()
    x = torch.randn(2, LENGTH, 8, dtype=torch.float64, requires_grad=True)
    y, _ = module(x, Context(LENGTH, LENGTH, causal=True), position)
    seen = largest(scores_by_hand(module, x, position), 3)
    assert not seen[:, -1].all()
    expected = equation(module, x, position, seen)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    inputs = [x, module.output.weight, module.query.weight]
    for mine, other in zip(*(torch.autograd.grad(out.sin().sum(), inputs) for out in (y, expected))):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)
    with torch.no_grad():
        state = module.new_state(LENGTH)
        for start, stop in itertools.pairwise((0, 5, 6, 7, 9)):
            context = Context(stop - start, stop, causal=True)
            part, state = module(x[:, start:stop], context, position, state)
            torch.testing.assert_close(part, y[:, start:stop], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("latent", [False, True])
def test_with_as_many_keys_as_tokens_it_is_the_attention_without_an_indexer(latent: bool):
    module, position = new_attention(latent, IndexerConfig(top_k=LENGTH, heads=2)), position_of()
    x = torch.randn(2, LENGTH, 8, dtype=torch.float64)
    y, _ = module(x, Context(LENGTH, LENGTH, causal=True), position)
    every = torch.ones(2, LENGTH, LENGTH, dtype=torch.bool).tril()
    torch.testing.assert_close(y, equation(module, x, position, every), rtol=1e-10, atol=1e-10)


def test_keys_are_chosen_of_those_that_the_pattern_and_padding_allow():
    module, position = new_attention(mechanism=SoftmaxConfig(pattern=Window(5))), position_of()
    x, valid = torch.randn(2, LENGTH, 8, dtype=torch.float64), torch.ones(2, LENGTH, dtype=torch.bool)
    valid[0, :2] = False
    y, _ = module(x, Context(LENGTH, LENGTH, causal=True, kv_valid=valid), position)
    scores = scores_by_hand(module, x, position)
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    allowed = (distance >= 0) & (distance <= 5) & valid[:, None]
    seen = largest(scores.masked_fill(~allowed, -torch.inf), 3) & allowed
    expected = equation(module, x, position, seen)
    torch.testing.assert_close(y[1], expected[1], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(y[0, 2:], expected[0, 2:], rtol=1e-10, atol=1e-10)


def test_of_equal_scores_the_earlier_keys_are_chosen_and_never_a_hidden_one():
    hidden = -torch.inf
    scores = torch.tensor([[[2.0, 1.0, 1.0, 3.0, 1.0], [1.0, hidden, hidden, hidden, hidden]]])
    first, second = choose(scores, 3)[0].tolist()
    assert first == [True, True, False, True, False]
    assert second == [True, False, False, False, False]


def test_scores_by_parts_are_the_scores_at_once(monkeypatch: pytest.MonkeyPatch):
    q, k, w = torch.randn(2, 3, 7, 4), torch.randn(2, 1, 11, 4), torch.randn(2, 7, 3)
    whole = index_scores(q, k, w)
    monkeypatch.setattr(indexed, "PRODUCTS", 150)
    with torch.no_grad():
        torch.testing.assert_close(index_scores(q, k, w), whole)
    assert index_scores(q.bfloat16(), k.bfloat16(), w.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("stage", ["dense", "sparse"])
@pytest.mark.parametrize("latent", [False, True])
def test_the_indexer_learns_from_its_divergence_alone(stage: Any, latent: bool):
    """mean_t KL(p_t || softmax I_t) over the keys of the stage, times its weight; p has no gradient."""
    config = IndexerConfig(top_k=3, heads=5, size=6, stage=stage, align=0.5)
    module, position = new_attention(latent, config).train(), position_of()
    x = torch.randn(2, LENGTH, 8, dtype=torch.float64, requires_grad=True)
    with collect_auxiliary_losses() as losses:
        y, _ = module(x, Context(LENGTH, LENGTH, causal=True), position)
    scores = scores_by_hand(module, x.detach(), position)
    every = torch.ones(2, LENGTH, LENGTH, dtype=torch.bool).tril()
    seen = every if stage == "dense" else largest(scores, 3)
    torch.testing.assert_close(y, equation(module, x, position, seen), rtol=1e-10, atol=1e-10)
    attention = plain_weights(module, x, position)[0].masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    p, log_q = attention.mean(1).detach(), scores.masked_fill(~seen, -torch.inf).log_softmax(-1)
    expected = 0.5 * (p * (p.log() - log_q))[seen].sum() / (2 * LENGTH)
    torch.testing.assert_close(losses["indexer"], expected, rtol=1e-10, atol=1e-10)
    own = dict(module.indexer.named_parameters())
    others = [p for name, p in module.named_parameters() if not name.startswith("indexer.")]
    grads = torch.autograd.grad(losses["indexer"], [x, *own.values(), *others], allow_unused=True)
    wanted = torch.autograd.grad(expected, list(own.values()))
    for mine, other in zip(grads[1 : 1 + len(own)], wanted):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-10)
    assert grads[0] is None
    assert all(grad is None for grad in grads[1 + len(own) :])
    of_output = torch.autograd.grad(y.sum(), list(own.values()), allow_unused=True)
    assert all(grad is None for grad in of_output), "a choice has no gradient"


def model(**indexer: Any) -> Any:
    torch.manual_seed(0)
    attention = {"num_attention_heads": 4, "indexer": {"top_k": 4, **indexer}}
    return polyformer.create_model("decoder-tiny", attention=attention, position="rope")


def test_an_indexer_in_the_dense_stage_comes_to_choose_what_attention_reads():
    """Its divergence falls to less than a third in 60 steps in which only the indexer learns."""
    decoder = model(stage="dense", heads=8).train()
    with torch.no_grad():
        for layer in decoder.decoder.layers:  # attention that prefers some keys
            layer.attention.query.weight.mul_(6)
            layer.attention.key.weight.mul_(6)
    own = [p for name, p in decoder.named_parameters() if ".indexer." in name]
    optimizer = torch.optim.Adam(own, lr=0.01)
    ids, losses = torch.randint(3, 100, (4, 24)), []
    for module in decoder.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for _ in range(60):
        with collect_auxiliary_losses() as terms:
            x = decoder.tokens(ids)
            decoder.decoder(x, torch.arange(24), Context(24, 24, causal=True))
        optimizer.zero_grad()
        terms["indexer"].backward()
        optimizer.step()
        losses.append(terms["indexer"].item())
    assert losses[-1] < losses[0] / 3, losses[::10]


def test_what_an_indexer_cannot_be_combined_with_is_named():
    indexer = IndexerConfig()
    with pytest.raises(InputError, match="indexer: expected the mechanism 'softmax', got 'linformer'"):
        AttentionConfig.from_dict({"mechanism": "linformer", "indexer": {}})
    with pytest.raises(InputError, match="value_residual: attention with an indexer has no such option"):
        AttentionConfig(value_residual=True, indexer=indexer)
    with pytest.raises(InputError, match=r"depth: 'act' reads keys of a layer .* attention\.indexer"):
        StackConfig.from_dict({"attention": {"indexer": {}}, "depth": "act"})
    with pytest.raises(
        InputError, match=r"indexer\.size: expected at least the 32 channels that positions rot"
    ):
        model(size=4)
    with pytest.raises(InputError, match="MultiHeadAttention is plain"):
        MultiHeadAttention(8, AttentionConfig(num_attention_heads=2, indexer=indexer))
    decoder = model()
    with pytest.raises(InputError, match="cache: 'snapkv' keeps keys by its own scores, but an indexer"):
        decoder.new_state(cache="snapkv")
    with pytest.raises(InputError, match="indexer: 'indexer' does not support context parallelism"):
        check_context_parallel(decoder.config.decoder, decoder.decoder, decoder.head, "lm")


def test_wrapped_caches_and_exports_say_what_they_lack():
    from polyformer.models.export_graphs import check_decoder

    with pytest.raises(InputError, match="cache: expected a decoder with only a KV cache in each layer"):
        check_decoder(model())
