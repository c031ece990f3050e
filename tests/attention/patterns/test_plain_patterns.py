"""Every pattern is its plain predicate, pair by pair, wherever its tokens stand."""

from collections.abc import Iterator

import plain_patterns
import pytest
import torch
from plain_patterns import Line
from torch import Tensor

from attention_cases import dense
from polyformer.attention.patterns import (
    Blockwise,
    Causal,
    Global,
    GlobalEnd,
    Links,
    Local2D,
    Neighbourhood,
    Pattern,
    Whole,
    Window,
)
from polyformer.attention.patterns.composition import And, Or, Without
from polyformer.core.sequence.context import Context, positions_from_mask
from registered import examples

ROWS, HEADS, QUERIES, KEYS = 2, 2, 19, 26

REGISTERED = {
    name: member
    for name, member in Pattern.registry.items()
    if member.__module__.startswith("polyformer.")  # other tests register patterns of their own
}
EXAMPLES: list[Pattern] = [example for member in REGISTERED.values() for example in examples(member)]
MORE: list[Pattern] = [
    Window(5, 1, dilation=2),
    GlobalEnd(3),
    Whole(9),
    Links(2, ((1,), (0, 4), (2, 3))),
    Blockwise(2, (2, 0, 1), shift=1),
    Local2D((9, 3, 2), (2, 1), (1, 1, 1)),
    Neighbourhood((6, 5), 3),
    Neighbourhood((3, 4, 4), 3),
    Window(2) & Global(3) | Window(0, 4),
    Without(Causal(), Window(2)),
]


def test_every_registered_pattern_has_a_plain_predicate() -> None:
    """One compared with itself alone may have any sign wrong: write its predicate in plain_patterns.py."""
    compositions = {member.__name__ for member in (And, Or, Without)}
    assert plain_patterns.PLAIN.keys() == REGISTERED.keys() | compositions


def contexts() -> Iterator[Context]:
    """Tokens after a cache and without one, causal and not, with padding, documents, sentences and marks."""
    torch.manual_seed(2)
    document = torch.randint(0, 3, (ROWS, KEYS)).sort(1).values
    valid = torch.rand(ROWS, KEYS) > 0.2
    left = torch.arange(KEYS) >= torch.tensor([[5], [0]])
    segment, marked = torch.randint(0, 3, (ROWS, KEYS)), torch.rand(ROWS, KEYS) > 0.8
    position = positions_from_mask(left)
    starts = torch.where(document.diff(dim=1, prepend=document[:, :1] - 1) != 0, torch.arange(KEYS), 0)
    in_document = torch.arange(KEYS) - starts.cummax(1).values
    last = slice(KEYS - QUERIES, KEYS)
    for causal in (False, True):
        yield Context(KEYS, KEYS, causal=causal)
        yield Context(QUERIES, KEYS, causal=causal)
        yield Context(QUERIES, KEYS, causal=causal, q_start=3)
        yield Context(QUERIES, KEYS, causal=causal, q_doc=document[:, last], kv_doc=document, kv_valid=valid)
        yield Context(QUERIES, KEYS, causal=causal, q_pos=position[:, last], kv_pos=position, kv_valid=left)
        yield Context(
            QUERIES,
            KEYS,
            causal=causal,
            q_pos=in_document[:, last],
            kv_pos=in_document,
            q_doc=document[:, last],
            kv_doc=document,
            q_segment=segment[:, last],
            kv_segment=segment,
            q_marked=marked[:, last],
            kv_marked=marked,
        )


def line(context: Context, b: int, head: int) -> Line:
    """One batch row and head of a context, in lists."""

    def table(values: Tensor | None, default: list[int]) -> list[int]:
        return default if values is None else values[b].tolist()

    zeros = [0] * KEYS
    return Line(
        head,
        context.causal,
        table(context.kv_pos, list(range(KEYS))),
        table(context.kv_doc, zeros),
        table(context.kv_segment, zeros),
        [bool(x) for x in table(context.kv_valid, [1] * KEYS)],
        [bool(x) for x in table(context.kv_marked, zeros)],
    )


def permitted(row: Line, i: int, j: int) -> bool:
    """What the context leaves to a pattern."""
    return row.valid[j] and row.document[i] == row.document[j] and (j <= i or not row.causal)


@pytest.mark.parametrize("pattern", [*EXAMPLES, *MORE], ids=str)
def test_a_pattern_is_its_plain_predicate(pattern: Pattern) -> None:
    for context in contexts():
        if context.causal and not pattern.causal():
            continue
        masks = dense(pattern, context, ROWS, HEADS)
        for b in range(ROWS):
            for h in range(HEADS):
                row, mask = line(context, b, h), masks[b, h].tolist()
                for query in range(context.q_len):
                    i = query + context.offset
                    keys = [j for j in range(KEYS) if permitted(row, i, j)]
                    expected = [j for j in keys if plain_patterns.attends(pattern, row, i, j)]
                    assert [j for j in keys if mask[query][j]] == expected, (context, b, h, i)


@pytest.mark.parametrize("name", ["Documents", "Padding"])
def test_what_a_context_forbids_is_a_pattern_too(name: str) -> None:
    """These say nothing that the context does not: all pairs are compared."""
    for context in contexts():
        masks = dense(Pattern.from_text(name), context, ROWS, 1)
        for b in range(ROWS):
            row = line(context, b, 0)
            expected = [
                [plain_patterns.PLAIN[name](None, row, i + context.offset, j) for j in range(KEYS)]
                for i in range(context.q_len)
            ]
            assert masks[b, 0].tolist() == expected
