"""Statements of five lecture texts (docs/seeds.md) about attention, feed-forward layers and token tables."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from polyformer.attention.functional.attend import attend
from polyformer.attention.patterns import Causal
from polyformer.attention.positions import NoPositionConfig, Shape
from polyformer.core.sequence.context import Context
from polyformer.models.architectures import Transformer
from polyformer.models.presets import create_model
from polyformer.nn.feedforward import DenseConfig
from polyformer.nn.stack import AttentionConfig, MultiHeadAttention

TINY = {
    "vocab_size": 31,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 16,
}


def tiny(name: str = "bert-base", **options: Any) -> Transformer:
    torch.manual_seed(0)
    return create_model(name, **{**TINY, "initializer_range": 0.5, **options}).double().eval()


def outputs(model: Transformer, ids: Tensor) -> Tensor:
    hidden = model(ids).last_hidden_state
    assert hidden is not None
    return hidden


def qkv(*shape: int) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(shape, dtype=torch.float64) for _ in range(3)]


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


@torch.no_grad()
def test_permuted_tokens_give_permuted_outputs():
    """Without positions vectors change places with their tokens; with positions the order matters."""
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    order = torch.tensor([0, 4, 2, 3, 1])
    model = tiny(position="none")
    close(outputs(model, ids[:, order]), outputs(model, ids)[:, order])
    model = tiny()
    assert (outputs(model, ids[:, order]) - outputs(model, ids)[:, order]).abs().max() > 1e-2


@pytest.mark.parametrize("backend", ["definition", "tiled", "sdpa"])
def test_shuffled_keys_and_values_change_nothing(backend: str):
    q, k, v = qkv(1, 2, 6, 4)
    order = torch.randperm(6)
    close(attend(q, k[:, :, order], v[:, :, order], backend=backend), attend(q, k, v, backend=backend))


def test_a_feedforward_is_a_convolution_of_width_one():
    """And so it reads each token by itself."""
    torch.manual_seed(0)
    module, x = DenseConfig(intermediate_size=7, activation="relu").build(3).double(), qkv(2, 5, 3)[0]
    weights = [layer.weight.unsqueeze(-1) for layer in (module.up, module.down)]
    inner = F.conv1d(x.mT, weights[0], module.up.bias).relu()
    close(module(x), F.conv1d(inner, weights[1], module.down.bias).mT)
    close(module(x)[:, 2], module(x[:, 2]))


def test_scores_with_positions_are_four_terms():
    """(x_i + p_i) W_q ((x_j + p_j) W_k)^T: content and position of the query, times those of the key."""
    x, p, _ = qkv(5, 4)
    w_q, w_k, _ = qkv(4, 4)
    whole = (x + p) @ w_q @ ((x + p) @ w_k).T
    terms = [a @ w_q @ w_k.T @ b.T for a in (x, p) for b in (x, p)]
    assert len(terms) == 4
    close(sum(terms[1:], terms[0]), whole)


def test_unscaled_products_grow_with_the_width():
    """Their deviation is sqrt(D). Unscaled, softmax has one weight near 1 and its gradient vanishes."""
    torch.manual_seed(0)
    slopes = dict[bool, list[float]]()
    for width in (16, 64, 256, 1024):
        q, k = torch.randn(2, 400, width, dtype=torch.float64)
        scores, scaled = q @ k.T, q @ k.T / math.sqrt(width)
        assert float(scores.std()) == pytest.approx(math.sqrt(width), rel=0.05)
        assert float(scaled.std()) == pytest.approx(1, rel=0.05)
        for divided, values in ((False, scores), (True, scaled)):
            weights = values.softmax(-1)
            slopes.setdefault(divided, []).append(float((weights * (1 - weights)).sum(-1).mean()))
    assert slopes[False] == sorted(slopes[False], reverse=True)
    assert slopes[False][-1] < min(slopes[True]) / 6


def test_attention_is_linear_in_its_values_only():
    q, k, v = qkv(1, 2, 6, 4)
    close(attend(q, k, 3 * v), 3 * attend(q, k, v))
    close(attend(q, k, v + q), attend(q, k, v) + attend(q, k, q))
    assert (attend(3 * q, k, v) - attend(q, k, v)).abs().max() > 0.1
    x = v
    assert (attend(x + q, x + q, x + q) - attend(x, x, x) - attend(q, q, q)).abs().max() > 0.1


def test_several_heads_cost_as_much_as_a_single_head():
    counts = set()
    for heads in (1, 2, 8):
        config = AttentionConfig(num_attention_heads=heads).override("backend", "definition")
        module = MultiHeadAttention(64, config)
        with FlopCounterMode(display=False) as counter:
            position = NoPositionConfig().build(Shape(hidden_size=64))
            module(torch.randn(1, 32, 64), Context(32, 32), position)
        counts.add(counter.get_total_flops())
    assert len(counts) == 1


def test_scores_of_two_sequences_are_a_rectangle():
    model = tiny("transformer-tiny")
    torch.manual_seed(2)
    source, target = torch.randint(3, 31, (1, 7)), torch.randint(3, 31, (1, 4))
    output = model(source, labels=target, output_attentions=True)
    assert {weights.shape[-2:] for weights in output.cross_attentions} == {(4, 7)}


def test_hiding_later_keys_is_reading_the_past_only():
    """One masked pass has the outputs of a pass per query, each over its own past."""
    q, k, v = qkv(1, 2, 6, 4)
    masked = attend(q, k, v, pattern=Causal(), context=Context(6, 6, causal=True))
    for i in range(6):
        alone = attend(q[:, :, i : i + 1], k[:, :, : i + 1], v[:, :, : i + 1])
        close(masked[:, :, i : i + 1], alone)


def test_a_table_is_a_product_with_one_hot_vectors():
    """One-hot vectors of different words have no similarity at all; rows of a table can have any."""
    torch.manual_seed(0)
    table, ids = torch.randn(9, 4, dtype=torch.float64), torch.tensor([3, 0, 8])
    codes = F.one_hot(ids, 9).double()
    close(codes @ table, F.embedding(ids, table))
    assert torch.equal(codes @ codes.T, torch.eye(3, dtype=torch.float64))
    assert float((codes != 0).double().mean()) == pytest.approx(1 / 9)
    assert bool((table[ids] != 0).all())


@torch.no_grad()
def test_equal_tokens_differ_only_after_attention():
    """ "flies" in two sentences: the table has a single vector, the encoder returns two."""
    model, time, fruit = tiny(), torch.tensor([[5, 6, 7, 8, 9]]), torch.tensor([[10, 6, 7, 11, 12]])
    assert torch.equal(model.tokens(time)[0, 1], model.tokens(fruit)[0, 1])
    assert (outputs(model, time)[0, 1] - outputs(model, fruit)[0, 1]).abs().max() > 1e-2
    alone = outputs(tiny(attention="Window(0, 0)"), time)[0, 1]
    close(alone, outputs(tiny(attention="Window(0, 0)"), fruit)[0, 1])


def test_similar_vectors_have_larger_products():
    torch.manual_seed(0)
    x = F.normalize(torch.randn(500, 16, dtype=torch.float64), dim=-1)
    products, distances = x[0] @ x.T, (x - x[0]).norm(dim=-1)
    assert torch.equal(products.argsort(descending=True), distances.argsort())


def test_sharp_attention_is_a_lookup():
    """With large scores a query gets the value of its key; with small ones a mixture."""
    k, v = torch.eye(4, dtype=torch.float64).view(1, 1, 4, 4), qkv(1, 1, 4, 3)[0]
    close(attend(k, k, v, scale=1e3), v)
    mixed = attend(k, k, v, scale=1e-3)
    assert (mixed - v.mean(2, keepdim=True)).abs().max() < 1e-2


def test_values_may_have_another_width():
    q, k, _ = qkv(1, 2, 5, 4)
    v = qkv(1, 2, 5, 7)[2]
    for backend in ("definition", "tiled", "sdpa"):
        close(attend(q, k, v, backend=backend), (q @ k.mT / 2).softmax(-1) @ v)


@torch.no_grad()
def test_an_encoder_sees_both_sides_a_decoder_the_left():
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    for name, seen in (("bert-base", [True] * 5), ("gpt2", [False, False, True, True, True])):
        model, changed = tiny(name), ids.clone()
        changed[0, 2] = 20
        moved = (outputs(model, changed) - outputs(model, ids)).abs().amax(-1)[0] > 1e-12
        assert moved.tolist() == seen
