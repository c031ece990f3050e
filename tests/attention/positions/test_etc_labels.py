"""ETC's labels: every pair named by the paper's rule, every score as written, fast through any backend."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from polyformer.attention.functional.attend import attend
from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.patterns import ETC
from polyformer.attention.positions import EtcLabelsConfig, Shape, Site
from polyformer.attention.positions.labels import EtcLabels
from polyformer.core.errors import InputError
from polyformer.core.sequence.context import Context
from polyformer.models.architectures import Transformer
from polyformer.models.config import ModelConfig
from polyformer.nn.stack import AttentionConfig, StackConfig

SITE = Site(1, lambda x: x, lambda x: x)


def named(i: int, j: int, glob: int, most: int, segments: list[int]) -> tuple[Any, ...]:
    """What the paper calls the pair: its piece, and the distance or whether the sentence is shared."""
    piece = "gl"[i >= glob] + "2" + "gl"[j >= glob]
    if piece in ("g2g", "l2l"):
        return piece, max(-most, min(most, i - j))
    return piece, segments[i] == segments[j]


def test_labels_are_one_for_each_name():
    """A global and a long part of 4 and 9 tokens: as many labels as names, each of one name."""
    segments = [0, 1, 2, 3, 0, 0, 1, 1, 1, 1, 2, 2, 2]
    table = torch.tensor([segments])
    context = Context(13, 13, q_segment=table, kv_segment=table)
    scheme = EtcLabelsConfig(global_tokens=4, max_distance=2).build(Shape(hidden_size=8))
    assert isinstance(scheme, EtcLabels)
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.long)
    labels = scheme.label(context, zero, torch.arange(13).view(-1, 1), torch.arange(13))[0, 0]
    label_of = {}
    for i in range(13):
        for j in range(13):
            name = named(i, j, 4, 2, segments)
            assert label_of.setdefault(name, int(labels[i, j])) == labels[i, j]
    assert sorted(label_of.values()) == list(range(4 * 2 + 6))


def plain(q: Tensor, k: Tensor, v: Tensor, scheme: EtcLabels, pattern: ETC, segments: list[int]) -> Tensor:
    """Scores one pair at a time, with vectors looked up by name."""
    glob, most = scheme.config.global_tokens, scheme.config.max_distance
    names = [("l2l", d) for d in range(-most, most + 1)] + [("g2g", d) for d in range(-most, most + 1)]
    names += [("l2g", False), ("l2g", True), ("g2l", False), ("g2l", True)]
    number = {name: i for i, name in enumerate(names)}
    table = scheme.tables[1].get_parameter("weight").unflatten(1, (scheme.heads, -1))
    rows = []
    for i in range(q.shape[2]):
        for_query = []
        for j in range(k.shape[2]):
            vector = table[number[named(i, j, glob, most, segments)]]
            score = (q[:, :, i] * (k[:, :, j] + vector)).sum(-1) / math.sqrt(q.shape[3])
            seen = i < glob or j < glob or abs(i - j) <= pattern.radius
            for_query.append(score if seen else torch.full_like(score, -math.inf))
        rows.append(torch.stack(for_query, -1))
    return torch.stack(rows, 2).softmax(-1) @ v


@pytest.mark.parametrize("backend", ["tiled", "definition"])
def test_scores_are_those_of_the_equation(backend: str):
    torch.manual_seed(0)
    segments = [0, 1, 2, *torch.randint(3, (20,)).tolist()]
    table = torch.tensor([segments])
    context = Context(23, 23, q_segment=table, kv_segment=table)
    scheme = EtcLabelsConfig(global_tokens=3, max_distance=4).build(
        Shape(hidden_size=10, num_layers=2, num_heads=2, head_size=5)
    )
    assert isinstance(scheme, EtcLabels)
    scheme.double()
    inputs = [torch.randn(1, 2, 23, 5, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    wanted = [*inputs, scheme.tables[1].get_parameter("weight")]
    weight = torch.randn(1, 2, 23, 5, dtype=torch.float64)
    q, k, v = inputs
    mod = scheme.score_mod(q, k, context, SITE)
    results = []
    for y in (
        attend(q, k, v, pattern=ETC(3, 2), score_mod=mod, context=context, backend=backend),
        plain(q, k, v, scheme, ETC(3, 2), segments),
    ):
        results.append((y, *torch.autograd.grad((y * weight).sum(), wanted, retain_graph=True)))
    for actual, expected in zip(*results):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def tiny() -> Transformer:
    attention = AttentionConfig(num_attention_heads=2, mechanism=SoftmaxConfig(pattern=ETC(3, 2, True, True)))
    stack = StackConfig(
        num_hidden_layers=2, attention=attention, position=EtcLabelsConfig(global_tokens=3, max_distance=4)
    )
    torch.manual_seed(0)
    model = Transformer(ModelConfig(vocab_size=19, hidden_size=12, encoder=stack)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_a_structured_model_sees_segments():
    """Another segment number changes the output; other numbers for the same sentences do not."""
    model, ids = tiny(), torch.randint(19, (1, 12))
    segments = torch.tensor([[0, 1, 2, 0, 0, 0, 1, 1, 2, 2, 2, 2]])
    expected = model(ids, segment_ids=segments).last_hidden_state
    same(model(ids, segment_ids=7 - 2 * segments).last_hidden_state, expected)
    moved = segments.clone()
    moved[0, 5] = 1
    assert (model(ids, segment_ids=moved).last_hidden_state - expected).abs().max() > 1e-3


def test_padding_and_packing_leave_a_structured_document_as_it_is():
    model, ids = tiny(), torch.randint(19, (1, 12))
    segments = torch.tensor([[0, 1, 2, 0, 0, 0, 1, 1, 2, 2, 2, 2]])
    expected = model(ids, segment_ids=segments).last_hidden_state
    left = torch.randint(19, (1, 3))
    mask = torch.cat([torch.zeros_like(left), torch.ones_like(ids), torch.zeros_like(left)], 1)
    longer = torch.cat([left, ids, left], 1)
    numbers = torch.cat([torch.full_like(left, 1), segments, torch.full_like(left, 2)], 1)
    same(model(longer, attention_mask=mask, segment_ids=numbers).last_hidden_state[:, 3:15], expected)
    packed = torch.cat([ids.flip(1), ids], 1)
    documents = torch.tensor([[0] * 12 + [1] * 12])
    output = model(packed, document_ids=documents, segment_ids=torch.cat([segments, segments], 1))
    same(output.last_hidden_state[:, 12:], expected)


@pytest.mark.parametrize("name", ["global_tokens", "max_distance"])
def test_what_cannot_be_is_named(name: str):
    with pytest.raises(InputError, match=f"{name}: expected 1 or more, got 0"):
        EtcLabelsConfig(**{name: 0})


def test_segments_of_another_shape_are_named():
    with pytest.raises(InputError, match=r"segment_ids: expected the shape \(1, 5\), got \(1, 4\)"):
        tiny()(torch.zeros(1, 5, dtype=torch.long), segment_ids=torch.zeros(1, 4, dtype=torch.long))
