"""Heads of images: what they read of texts and images, by their equations."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.core.ops.norms import LayerNormConfig
from polyformer.models.architectures import VisionConfig, VisionTransformer
from polyformer.models.presets import create_model
from polyformer.nn.heads import (
    ClassifyImageConfig,
    EmbedAttendedConfig,
    EmbedImageConfig,
    EmbedProjectedConfig,
    HeadInput,
    HeadShape,
)
from polyformer.nn.heads.image import Feature

LENGTHS = 5, 3, 1
FEATURES: list[Feature] = ["first", "others", "first_and_others"]


def naive(row: Tensor, how: Feature) -> Tensor:
    """v of the hidden states [T, E] of a text alone."""
    others = row[1:] if len(row) > 1 else row
    mean = torch.stack([*others]).sum(0) / len(others)
    return {"first": row[0], "others": mean, "first_and_others": torch.cat([row[0], mean])}[how]


def inputs(side: str) -> tuple[HeadInput, list[Tensor]]:
    torch.manual_seed(0)
    hidden, order = torch.randn(3, 5, 6, dtype=torch.float64), torch.arange(5)
    lengths = torch.tensor(LENGTHS)[:, None]
    mask = order < lengths if side == "right" else order >= 5 - lengths
    return HeadInput(hidden, mask, hidden.new_empty(0, 0)), [row[real] for row, real in zip(hidden, mask)]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("how", FEATURES)
def test_logits_are_the_equation(how: Feature, side: str):
    read, rows = inputs(side)
    config = ClassifyImageConfig(num_labels=4, feature=how, pooled_norm=LayerNormConfig(eps=0.1))
    head = config.build(HeadShape(hidden_size=6, vocab_size=1)).double()
    v = torch.stack([naive(row, how) for row in rows])
    v = F.layer_norm(v, v.shape[-1:], eps=0.1)
    expected = v @ head.output.weight.T + head.output.bias
    loss, logits = head(read, torch.tensor([1, 3, 0]))
    torch.testing.assert_close(logits(), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(loss, F.cross_entropy(expected, torch.tensor([1, 3, 0])))


@pytest.mark.parametrize("how", FEATURES)
def test_vectors_are_the_equation(how: Feature):
    read, rows = inputs("right")
    v = torch.stack([naive(row, how) for row in rows])
    shape = HeadShape(hidden_size=6, vocab_size=1)
    _, plain = EmbedImageConfig(feature=how, normalize=False).build(shape)(read, None)
    torch.testing.assert_close(plain(), v, rtol=1e-12, atol=1e-12)
    head = EmbedImageConfig(feature=how, projection=3).build(shape).double()
    _, projected = head(read, None)
    expected = v @ head.get_parameter("projection.weight").T
    expected = expected / expected.square().sum(1, keepdim=True).sqrt()
    torch.testing.assert_close(projected(), expected, rtol=1e-12, atol=1e-12)
    with pytest.raises(InputError, match="labels: the head 'embed_image' has no loss"):
        head(read, torch.tensor([1, 3, 0]))


def test_registers_and_a_distillation_token_are_not_read():
    config = VisionConfig.examples()[0]
    options = {"registers": 2, "distillation_token": True, "head": EmbedImageConfig(normalize=False)}
    for name, value in options.items():
        config = config.override(name, value)
    model = VisionTransformer(config).eval()
    output = model(torch.randn(2, 1, 12, 8))
    hidden = output.last_hidden_state
    assert hidden is not None
    expected = torch.cat([hidden[:, 0], hidden[:, 4:].mean(1)], -1)
    torch.testing.assert_close(output.logits, expected)


def test_an_image_without_a_class_token_is_refused():
    with pytest.raises(InputError, match="head: 'classify_image' reads a class token"):
        create_model("vit-mini", class_token=False, head="classify_image")


def test_a_learned_query_attends_to_all_tokens():
    """Token by token, without padding."""
    read, rows = inputs("left")
    config = EmbedAttendedConfig(pool_heads=2, pool_size=5, pool_activation="relu", normalize=False)
    head: Any = config.build(HeadShape(hidden_size=6, vocab_size=1)).double()
    vectors = []
    for row in rows:
        parts = []
        for own in (slice(0, 3), slice(3, 6)):
            query = (head.probe.weight @ head.query.weight.T + head.query.bias)[0, own]
            keys = (row @ head.key.weight.T + head.key.bias)[:, own]
            values = (row @ head.value.weight.T + head.value.bias)[:, own]
            parts.append((keys @ query / 3**0.5).softmax(0) @ values)
        y = torch.cat(parts) @ head.output.weight.T + head.output.bias
        mlp = head.pool_feedforward
        inner = F.layer_norm(y, (6,), eps=1e-6) @ mlp.up.weight.T + mlp.up.bias
        vectors.append(y + inner.relu() @ mlp.down.weight.T + mlp.down.bias)
    _, predicted = head(read, None)
    torch.testing.assert_close(predicted(), torch.stack(vectors), rtol=1e-12, atol=1e-12)


def test_texts_are_pooled_at_their_first_end_token():
    """Of the real tokens; a text without it at its last token."""
    read, rows = inputs("right")
    ids = torch.tensor([[4, 7, 3, 7, 5], [4, 5, 6, 7, 7], [7, 7, 7, 7, 7]])
    config = EmbedProjectedConfig(end_token=7, projection=4, projection_bias=True, normalize=False)
    head: Any = config.build(HeadShape(hidden_size=6, vocab_size=1)).double()
    _, predicted = head(dataclasses.replace(read, ids=ids), None)
    pooled = torch.stack([rows[0][1], rows[1][2], rows[2][0]])
    expected = pooled @ head.projection.weight.T + head.projection.bias
    torch.testing.assert_close(predicted(), expected, rtol=1e-12, atol=1e-12)
    with pytest.raises(InputError, match="input_ids: this head pools the first token 7 of each text"):
        head(read, None)
