"""Tokens marked by the caller: who attends to whom, the layout, and how a model takes the marks."""

from typing import Any

import pytest
import torch
from torch import Tensor

from polyformer.attention.functional.attend import attend
from polyformer.attention.patterns import Global, Marked, Pattern, Window
from polyformer.core.errors import InputError
from polyformer.core.sequence.context import Context
from polyformer.models.architectures import Transformer
from polyformer.models.presets import create_model


def marks(rows: int, length: int, *where: tuple[int, int]) -> Tensor:
    table = torch.zeros(rows, length, dtype=torch.bool)
    for row, slot in where:
        table[row, slot] = True
    return table


def context(queries: int = 9, keys: int = 9, **options: Any) -> Context:
    """Rows with one, two and no global tokens."""
    table = marks(3, keys, (0, keys - 3), (1, 0), (1, keys - 1))
    return Context(queries, keys, q_marked=table[:, -queries:], kv_marked=table, **options)


def mask(pattern: Pattern, context: Context) -> Tensor:
    b, h = torch.arange(3).view(-1, 1, 1, 1), torch.zeros(1, 1, 1, 1, dtype=torch.long)
    q, kv = torch.arange(context.q_len).view(-1, 1), torch.arange(context.kv_len)
    return pattern.allows(context, b, h, q, kv).expand(3, 1, context.q_len, context.kv_len)[:, 0]


def test_marked_tokens_see_everything_and_are_seen_by_everything():
    seen = mask(Marked(), context())
    expected = torch.zeros(3, 9, 9, dtype=torch.bool)
    expected[0, 6] = expected[0, :, 6] = True
    expected[1, [0, 8]] = expected[1, :, [0, 8]] = True
    assert torch.equal(seen, expected)
    assert not mask(Marked(), Context(9, 9)).any()


@pytest.mark.parametrize("pattern", [Marked(), Window(1) | Marked(), Global(2) | Marked()], ids=str)
@pytest.mark.parametrize("queries", [9, 4, 1])
def test_the_layout_covers_the_mask(pattern: Pattern, queries: int):
    marked_context = context(queries)
    seen = mask(pattern, marked_context)
    for row in pattern.layout(marked_context, 4):
        mine = seen[:, row.start : row.stop]
        needed = torch.zeros(9, dtype=torch.bool)
        for start, stop in row.keys.some:
            needed[start:stop] = True
        assert not (mine.any((0, 1)) & ~needed).any()
        for start, stop in row.keys.full:
            assert mine[..., start:stop].all()


def test_few_marks_leave_most_queries_their_window():
    table = marks(2, 4096, (0, 100), (1, 3000))
    marked_context = Context(4096, 4096, q_marked=table, kv_marked=table)
    rows = (Window(8) | Marked()).layout(marked_context, 128)
    wide = [row for row in rows if row.keys.some == ((0, 4096),)]
    assert [(row.start, row.stop) for row in wide] == [(100, 101), (3000, 3001)]


@pytest.mark.parametrize("causal", [False, True])
def test_backends_agree(causal: bool):
    torch.manual_seed(0)
    table = marks(2, 150, (0, 3), (0, 140), (1, 77))
    marked_context = Context(150, 150, causal=causal, q_marked=table, kv_marked=table)
    inputs = [torch.randn(2, 2, 150, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    results = []
    for backend in ("definition", "tiled", "sdpa"):
        y = attend(*inputs, pattern=Window(5) | Marked(), context=marked_context, backend=backend)
        results.append((y, *torch.autograd.grad(y.square().sum(), inputs)))
    for others in results[1:]:
        for actual, expected in zip(others, results[0]):
            torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def model(name: str = "encoder-tiny") -> Transformer:
    torch.manual_seed(0)
    return create_model(name, attention=Window(1) | Marked()).double().eval()


def test_a_model_takes_the_marks_of_each_row():
    torch.manual_seed(1)
    ids, table = torch.randint(300, (2, 9)), marks(2, 9, (0, 2), (1, 7), (1, 8)).long()
    weights = model()(ids, global_attention_mask=table, output_attentions=True).attentions[0]
    seen = weights.sum(1) > 0
    near = (torch.arange(9).view(-1, 1) - torch.arange(9)).abs() <= 1
    marked = table.bool()
    assert torch.equal(seen, near | marked.unsqueeze(1) | marked.unsqueeze(2))


@torch.no_grad()
def test_marks_stay_with_the_cache():
    """Given in chunks, left out where there are none, and reordered with the rest of the state."""
    decoder = model("decoder-tiny")
    torch.manual_seed(1)
    ids, table = torch.randint(500, (2, 9)), marks(2, 9, (0, 1), (1, 0), (1, 4)).long()
    expected = decoder(ids, global_attention_mask=table).last_hidden_state
    for split in ([4, 1, 4], [5, 4], [1] * 9):
        state, outputs, start = decoder.new_state(), [], 0
        for part in ids.split(split, 1):
            new = table[:, start : start + part.shape[1]]
            keywords = {"global_attention_mask": new} if new.any() else {}
            output = decoder(part, state=state, **keywords)
            state, start = output.state, start + part.shape[1]
            outputs.append(output.last_hidden_state)
        torch.testing.assert_close(torch.cat(outputs, 1), expected, rtol=1e-10, atol=1e-10)
    order = torch.tensor([1, 0, 1])
    state = decoder(ids[:, :5], global_attention_mask=table[:, :5], use_cache=True).state.reorder(order)
    rest = decoder(ids[order, 5:], state=state).last_hidden_state
    torch.testing.assert_close(rest, expected[order, 5:], rtol=1e-10, atol=1e-10)


def test_wrong_marks_are_refused():
    ids = torch.ones(2, 5, dtype=torch.long)
    message = r"global_attention_mask: expected the shape \(2, 5\), got \(2, 4\)"
    with pytest.raises(InputError, match=message):
        model()(ids, global_attention_mask=torch.ones(2, 4))
    with pytest.raises(InputError, match="global_attention_mask: no pattern of the encoder reads it"):
        create_model("encoder-tiny")(ids, global_attention_mask=torch.ones(2, 5))
