"""Recurrent layers in models of the library, and the measures of their claims."""

from pathlib import Path

import pytest
import torch
from torch import nn

from polyformer.core.sequence.context import Context
from polyformer.models.presets import create_model
from polyformer_lab.cells import Cell
from polyformer_lab.layers import EndsConfig, LSTMConfig, LSTMLayer
from polyformer_lab.measures.compute import step_of_level, training_steps, weights
from polyformer_lab.measures.scores import drawn_direction, moved_loss

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
