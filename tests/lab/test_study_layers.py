"""Layers of studies: recurrent, classifying, rounded, and without one of their parts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from polyformer.core.errors import InputError
from polyformer.core.host_values import next_labels
from polyformer.core.ops.layers import pool
from polyformer.core.ops.norms import LayerNormConfig
from polyformer.core.sequence.context import Context
from polyformer.data import TokenizerConfig, build_tokenizer
from polyformer.models.architectures import Transformer
from polyformer.models.presets import create_model, model_config
from polyformer.nn.feedforward.feedforward import DenseConfig
from polyformer.training.recipes.fit import Fitted
from polyformer_lab.cells import Cell
from polyformer_lab.layers import (
    DecoderClassification,
    DecoderClassificationConfig,
    EndsConfig,
    LSTMConfig,
    LSTMLayer,
    NoNormConfig,
    PlainBlockConfig,
    RecurrentWriter,
    RoundedConfig,
    Rounding,
    with_rounding,
)
from polyformer_lab.measures.compute import sliding_cost, step_of_level, training_steps, weights
from polyformer_lab.measures.scores import Ensemble, drawn_direction, learned_spans, moved_loss
from polyformer_lab.measures.strings import writer_of

SIZES = {"hidden_size": 8, "vocab_size": 20, "position": "none"}
ABSENT = {"num_attention_heads": 1, "head_size": 1, "bias": False, "mechanism": "none"}


def layer(bidirectional: bool) -> LSTMLayer:
    torch.manual_seed(0)
    return LSTMConfig(bidirectional=bidirectional).build(8)


@torch.no_grad()
def test_both_directions_start_at_the_ends_of_a_text():
    lstm, x = layer(True), torch.randn(2, 5, 8)
    valid = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    y = lstm(x, Context(5, 5, kv_valid=valid))
    torch.testing.assert_close(y[:1], lstm.lstm(x[:1])[0])
    torch.testing.assert_close(y[1:, :3], lstm.lstm(x[1:, :3])[0])


@torch.no_grad()
def test_a_recurrent_decoder_reads_on_from_its_state():
    torch.manual_seed(0)
    model = create_model("decoder-tiny", num_hidden_layers=2, attention=ABSENT, feedforward="lstm", **SIZES)
    ids = torch.randint(0, 20, (2, 7))
    whole = model.eval()(ids).logits
    start = model(ids[:, :4], use_cache=True)
    rest = model(ids[:, 4:], state=start.state, use_cache=True)
    torch.testing.assert_close(torch.cat([start.logits, rest.logits], 1), whole)
    other = ids.clone()
    other[:, 0] = (ids[:, 0] + 1) % 20
    assert not torch.allclose(model(other).logits[:, -1], whole[:, -1])


@torch.no_grad()
def test_without_attention_the_source_is_a_vector_of_its_ends():
    torch.manual_seed(0)
    k, v, q = (torch.randn(2, 2, n, 4) for n in (5, 5, 3))
    valid = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    y, _ = EndsConfig().cross().build(2, 4)(q, k, v, Context(3, 5, kv_valid=valid), None, None)
    torch.testing.assert_close(
        y, (k[:, :, 0] + torch.stack([v[0, :, 4], v[1, :, 2]]))[:, :, None].expand_as(q)
    )


@torch.no_grad()
def test_directions_have_the_norms_of_the_rows_and_weights_return():
    linear = nn.Linear(3, 2)
    model = nn.Sequential(linear, nn.LayerNorm(2))
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    direction = drawn_direction(model, torch.Generator().manual_seed(0))
    assert list(direction) == ["0.weight"]
    torch.testing.assert_close(direction["0.weight"].norm(dim=1), before["0.weight"].norm(dim=1))
    moved = moved_loss(model, direction, 2.0, lambda: float(linear.weight[0, 0]))
    assert moved == pytest.approx(float(before["0.weight"][0, 0] + 2 * direction["0.weight"][0, 0]))
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())


def test_steps_have_equal_tokens(tmp_path: Path):
    models = {"LSTM": {"preset": "decoder-tiny", "attention": ABSENT, "feedforward": "lstm", **SIZES}}
    rows = [*training_steps(Cell((), None, tmp_path, None, "training-steps", {}), models, 8, [2, 8], 1)]
    assert [(row["model"], row["length"]) for row in rows] == [("LSTM", 2), ("LSTM", 8)]
    assert all(row["milliseconds"] > 0 for row in rows)


def test_weights_without_absent_projections():
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 20}
    parts = {"decoder.attention": "ends", "decoder.feedforward": "lstm", "position": "none"}
    model = create_model("transformer-small", **sizes, **parts)
    assert weights(model.decoder) == 4 * 8 * 8 + 2 * 4 * 8 * 8  # cross-attention and LSTM
    assert weights(create_model("transformer-small", **sizes, intermediate_size=16).encoder) == 8 * 8 * 8


def test_a_level_between_two_evaluations():
    losses = [(50.0, 4.0), (100.0, 3.0), (150.0, 3.5), (200.0, 2.0)]
    assert step_of_level(losses, 3.5, 300) == 75
    assert step_of_level(losses, 1.0, 300) == 300


def test_logits_are_a_linear_layer_of_the_last_token_without_padding():
    tokenizer = build_tokenizer(TokenizerConfig(algorithm="bytes"), [])
    config = DecoderClassificationConfig(labels=("0", "1", "2"), max_length=16)
    task = DecoderClassification(config, tokenizer)
    torch.manual_seed(0)
    model = Transformer(task.adapt(model_config("decoder-tiny"))).eval()
    output: Any = model.head.output
    rows = [{"text": "a long text"}, {"text": "short"}]
    [(numbers, logits)] = task.rows.logits(model, rows)
    batch = task.rows.collate([task.rows.encode_rows(rows)[number] for number in numbers])
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
        last = pool(hidden, batch["attention_mask"].bool(), "last")
        expected = output(last)
    assert logits.shape == (2, 3)
    torch.testing.assert_close(logits, expected)


def test_weights_are_rounded_and_the_gradient_is_not():
    weight = torch.tensor([[-3.0, 0.4, 1.6, 2.0], [0.0, 0.0, 0.0, 0.0]], requires_grad=True)
    rounded = Rounding(3)(weight)
    assert rounded.tolist() == [[-3.0, 0.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0]]
    (rounded * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [[1.0, 2.0, 3.0, 4.0]] * 2


def test_a_layer_rounds_both_matrices():
    torch.manual_seed(0)
    dense = DenseConfig(intermediate_size=16).build(8)
    layer = RoundedConfig(intermediate_size=16, bits=2).build(8)
    layer.load_state_dict(
        {
            name: dense.state_dict()[name.replace("parametrizations.weight.original", "weight")]
            for name in layer.state_dict()
        }
    )
    x = torch.randn(2, 3, 8)
    expected = (x @ Rounding(2)(dense.up.weight).mT + dense.up.bias).relu()
    expected = expected @ Rounding(2)(dense.down.weight).mT + dense.down.bias
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(with_rounding(dense, 2)(x), expected)
    with pytest.raises(InputError, match="bits"):
        RoundedConfig(bits=1)


BASELINE_SIZES = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 20}


@torch.no_grad()
def test_an_ensemble_mixes_probabilities_within_documents():
    torch.manual_seed(0)
    models = [create_model("decoder-tiny", **BASELINE_SIZES, initializer_range=0.5).eval() for _ in range(2)]
    ids, documents = torch.randint(0, 20, (2, 7)), torch.tensor([[0, 0, 0, 1, 1, 1, 1]] * 2)
    batch = {"input_ids": ids, "labels": ids, "document_ids": documents}
    same = float(Ensemble([models[0]] * 3)(**batch).loss)
    assert same == pytest.approx(float(models[0](**batch).loss), rel=1e-5)
    mixed = sum(model(input_ids=ids, document_ids=documents).logits.softmax(-1) for model in models) / 2
    targets = next_labels(ids, documents)
    assert (targets == -100).sum() == 4
    own = torch.nn.functional.cross_entropy(torch.log(torch.as_tensor(mixed)).mT, targets)
    assert float(Ensemble(models)(**batch).loss) == pytest.approx(float(own), rel=1e-5)


def test_only_attention_reads_more_than_the_last_states():
    torch.manual_seed(0)
    source, target = torch.randint(4, 14, (2, 6)), torch.randint(4, 14, (2, 5))
    for attention in (False, True):
        writer = writer_of({"preset": "recurrent", "hidden_size": 8, "attention": attention})
        assert isinstance(writer, RecurrentWriter)
        output = writer(source, target, torch.tensor(0))
        assert output.logits.shape == (2, 5, 14)
        later = target.clone()
        later[:, -1] = 4  # the last target is not read
        assert torch.equal(writer(source, later, torch.tensor(0)).logits, output.logits)
        assert ("query.weight" in dict(writer.named_parameters())) == attention


def test_layers_without_a_part():
    x = torch.randn(2, 3, 8)
    block = PlainBlockConfig().build(8, 2, LayerNormConfig(), 0.0)
    norms = block.norms
    torch.testing.assert_close(block(x, [torch.sin, torch.cos]), norms[1](norms[0](x).sin()).cos())
    assert torch.equal(NoNormConfig().build(8)(x), x)


def test_spans_by_layer(tmp_path: Path):
    model = create_model(
        "decoder-tiny", **BASELINE_SIZES, attention="adaptive_span(max_span=16, initial=0.5)"
    )
    cell = Cell((), None, tmp_path, None, "learned-spans", {})
    unused: Any = None
    vars(cell)["fitted"] = Fitted(unused, unused, unused, model, unused, {})
    assert list(learned_spans(cell)) == [{"layer": n, "span": 8.0, "longest": 8.0} for n in (1, 2)]


def test_the_factor_is_of_the_times_per_token(tmp_path: Path):
    cell = Cell((), None, tmp_path, None, "sliding-cost", {})
    model = {"preset": "decoder-tiny", **BASELINE_SIZES, "position": "none"}
    (row,) = sliding_cost(cell, [16], model, 1)
    assert row["factor"] == pytest.approx(row["sliding_ms"] / row["memory_ms"])
