"""What each pattern means, written out; that they compose, travel as text and keep their word."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from attention_cases import dense, patterns
from polyformer.attention.functional.attend import attend
from polyformer.attention.patterns import Causal, Documents, Full, Global, Padding, Pattern, Window
from polyformer.attention.patterns.composition import MaskModPattern
from polyformer.attention.patterns.implied import implied, runs
from polyformer.attention.patterns.layout import Keys, Row
from polyformer.core.errors import InputError
from polyformer.core.sequence.context import Context, positions_from_mask


def seen(pattern: Pattern, context: Context) -> list[list[int]]:
    """For each query of the first batch row and head, the keys that it sees."""
    return [row.nonzero().flatten().tolist() for row in dense(pattern, context, 1, 1)[0, 0]]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (Full(), [[0, 1, 2, 3, 4]] * 5),
        (Causal(), [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]]),
        (Window(1), [[0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4]]),
        (Window(2, 0), [[0], [0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4]]),
        (Window(0, 1), [[0, 1], [1, 2], [2, 3], [3, 4], [4]]),
        (Window(0, 0), [[0], [1], [2], [3], [4]]),
        (Window(1, 1, dilation=2), [[0, 2], [1, 3], [0, 2, 4], [1, 3], [2, 4]]),
        (Global(1), [[0, 1, 2, 3, 4], [0], [0], [0], [0]]),
        (Window(1, 0) | Global(1), [[0, 1, 2, 3, 4], [0, 1], [0, 1, 2], [0, 2, 3], [0, 3, 4]]),
        (Causal() & Window(1), [[0], [0, 1], [1, 2], [2, 3], [3, 4]]),
    ],
    ids=str,
)
def test_what_a_pattern_means(pattern: Pattern, expected: list[list[int]]) -> None:
    assert seen(pattern, Context(5, 5)) == expected


def test_a_window_counts_the_keys_beside_the_token() -> None:
    context = Context(1001, 1001)
    assert len(seen(Window(256), context)[500]) == 513
    assert len(seen(Window(255, 0), context)[500]) == 256
    assert len(seen(Window(100, dilation=3), context)[500]) == 201


def test_queries_after_a_cache_see_by_slot() -> None:
    assert seen(Causal(), Context(2, 5)) == [[0, 1, 2, 3], [0, 1, 2, 3, 4]]
    assert seen(Window(1), Context(2, 5)) == [[2, 3, 4], [3, 4]]
    assert seen(Window(1), Context(2, 5, q_start=1)) == [[0, 1, 2], [1, 2, 3]]


def test_documents_and_padding_follow_the_context() -> None:
    doc = torch.tensor([[0, 0, 1, 1, 1]])
    context = Context(5, 5, q_doc=doc, kv_doc=doc, kv_valid=torch.tensor([[True, True, False, True, True]]))
    assert seen(Documents(), context) == [[0, 1], [0, 1], [2, 3, 4], [2, 3, 4], [2, 3, 4]]
    assert seen(Padding(), context) == [[0, 1, 3, 4]] * 5
    assert seen(Documents() & Padding(), Context(2, 2)) == [[0, 1]] * 2, (
        "a context without them forbids nothing"
    )


def test_global_tokens_are_found_behind_left_padding() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1]])
    positions = positions_from_mask(mask)
    context = Context(5, 5, q_pos=positions, kv_pos=positions, kv_valid=mask.bool())
    assert seen(Global(1) & Padding(), context)[2:] == [[2, 3, 4], [2], [2]]


def test_what_a_context_implies() -> None:
    doc = torch.zeros(1, 4, dtype=torch.long)
    assert implied(Context(4, 4)) is None
    assert implied(Context(4, 4, causal=True)) == Causal()
    full = Context(4, 4, causal=True, q_doc=doc, kv_doc=doc, kv_valid=torch.ones(1, 4, dtype=torch.bool))
    assert implied(full) == Causal() & Documents() & Padding()


def test_runs_of_true() -> None:
    assert runs(torch.tensor([True, True, False, True, False])) == ((0, 2), (3, 4))
    assert runs(torch.tensor([False, False])) == runs(torch.zeros(0, dtype=torch.bool)) == ()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(patterns)
def test_a_relative_pattern_is_the_same_along_every_diagonal(pattern: Pattern) -> None:
    context = Context(23, 23, kv_valid=torch.arange(23)[None] != 7)
    if pattern.structure.by_distance:
        mask = dense(pattern, context, 1, 1)[0, 0]
        assert torch.equal(mask[1:, 1:], mask[:-1, :-1])


def test_which_patterns_are_relative() -> None:
    assert (Window(3) & Causal() | Full()).structure.by_distance
    assert not (Window(3) | Global(1)).structure.by_distance
    assert not Documents().structure.by_distance
    assert not MaskModPattern(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx).structure.by_distance


@given(patterns)
def test_text_reads_back(pattern: Pattern) -> None:
    assert Pattern.from_text(pattern.to_text()) == pattern


def test_text_is_short_hand_too() -> None:
    assert Pattern.from_text("Window(256) | Global(1) & Causal") == Window(256) | Global(1) & Causal()
    assert Pattern.from_text(" (Window(4, after=0) | Global) ") == Window(4, 0) | Global()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Window(256", r"expected an expression like 'Window\(256\) \| Global\(1\)', got 'Window\(256'"),
        ("Windw(3)", "unknown pattern 'Windw': did you mean 'Window'?"),
        ("Window(3) + Global(1)", "expected names joined by & and |"),
        ("Window(open('x'))", r"expected a plain value, got \"open\('x'\)\""),
        ("Window(3, 4, 5, 6)", "pattern Window: too many positional arguments"),
        ("Window(size=3)", "unknown option of pattern Window 'size': expected one of 'after', 'before'"),
        ("MaskModPattern(3)", "unknown pattern 'MaskModPattern'"),
        ("Window(-1)", "Window: before: expected 0 or more, got -1"),
        (
            "Window(0)",
            "Window: a window of 0 keys on both sides sees only the token itself; use 1 or more, or",
        ),
        ("Window(4, 4, 0)", "Window: dilation: expected 1 or more, got 0"),
        ("Global(0)", "Global: tokens: expected 1 or more, got 0"),
    ],
)
def test_bad_text_is_named(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Pattern.from_text(text)


def test_any_function_joins_in() -> None:
    def even(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx % 2 == 0

    context = Context(3, 3)
    assert seen(Causal() & even, context) == seen(even & Causal(), context) == [[0], [0], [0, 2]]
    assert (
        seen(Window(0, 1) | even, context)
        == seen(even | Window(0, 1), context)
        == [[0, 1, 2], [0, 1, 2], [0, 2]]
    )
    with pytest.raises(
        InputError, match=r"a function \(mask_mod\) cannot be saved; write it as a Pattern class"
    ):
        (Causal() & even).to_text()


def test_a_user_defined_layout_given_as_rows() -> None:
    rows = (Row(0, 4, Keys(((0, 3),), ((0, 2),))), Row(4, 9, Keys(((2, 99),), ((1, 4),))))
    pattern = MaskModPattern(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, rows)
    context = Context(9, 9)
    assert pattern.keys(context, 0, 2) == Keys(((0, 3),), ((0, 2),))
    assert pattern.keys(context, 2, 6) == Keys(((0, 9),), ((1, 2),)), (
        "united and intersected, inside the keys"
    )
    assert [(row.start, row.stop) for row in pattern.layout(context, 8)] == [(0, 4), (4, 8), (8, 9)]
    assert MaskModPattern(pattern.function).keys(context, 0, 2) == Keys(((0, 9),))


class EveryThird(Pattern):
    """A user's pattern of three lines: no layout, so it may look everywhere."""

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx % 3 == 0


def test_a_pattern_needs_one_method() -> None:
    context = Context(2, 7)
    assert seen(EveryThird(), context) == [[0, 3, 6]] * 2
    assert EveryThird().keys(context, 0, 2) == Keys(((0, 7),))
    assert Pattern.from_text("EveryThird() & Window(2)") == EveryThird() & Window(2), "a row is not needed"


@dataclasses.dataclass(frozen=True, eq=False)
class _Given(Pattern):
    """A pattern in a tensor, which has no equality by value."""

    allowed: torch.Tensor

    def allows(self, context: Context, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> torch.Tensor:
        return self.allowed[q_idx, kv_idx]


class _Plain(Pattern):
    """A pattern without fields, and without a decorator."""


def test_patterns_in_tensors_equal_only_themselves() -> None:
    """A context stores masks and plans by pattern: layers with different tables must not share them."""
    torch.manual_seed(0)
    tables = [_Given(torch.rand(6, 6) > 0.4) for _ in range(2)]
    assert tables[0] != tables[1]
    assert tables[0] == tables[0]
    assert _Plain() == _Plain()
    assert hash(_Plain()) == hash(_Plain())
    assert Window(3) == Window(3) != Window(4)
    q, k, v = (torch.randn(1, 2, 6, 4) for _ in range(3))
    shared = Context(6, 6)
    with torch.no_grad():
        for table in tables:
            got = attend(q, k, v, pattern=table, context=shared)
            torch.testing.assert_close(got, attend(q, k, v, pattern=table, backend="definition"))


def test_a_pattern_s_name_is_its_own() -> None:
    def other() -> None:
        class Window(Pattern):
            """Not the one that files mean by this name."""

    with pytest.raises(
        InputError, match=r"pattern 'Window' of test_patterns: the name is taken by polyformer"
    ):
        other()
    assert Pattern.from_text("Window(3)") == Window(3)


@pytest.mark.parametrize("name", ["And", "MaskModPattern", "BlockPattern", "InResidueClass", "_Pair"])
def test_what_is_no_pattern_by_itself_has_no_name(name: str) -> None:
    with pytest.raises(InputError, match=f"unknown pattern '{name}'"):
        Pattern.from_text(f"{name}()")


def test_a_mask_of_queries_alone_gets_both_axes() -> None:
    pattern = MaskModPattern(lambda b, h, q_idx, kv_idx: q_idx > 1)  # the first query stands at 1
    assert seen(pattern, Context(2, 3)) == [[], [0, 1, 2]]


def test_context_checks_its_tables() -> None:
    with pytest.raises(InputError, match=r"kv_valid: expected 5 entries per row, got shape \(1, 4\)"):
        Context(5, 5, kv_valid=torch.ones(1, 4))
    with pytest.raises(InputError, match="q_doc and kv_doc: expected both or neither"):
        Context(5, 5, q_doc=torch.zeros(1, 5))


def test_rows_of_a_context() -> None:
    plain = Context(3, 3, q_pos=torch.arange(3))
    assert plain.rows(1, 2) is plain
    context = Context(3, 3, kv_valid=torch.eye(3).bool())
    assert context.rows(1, 3).kv_valid.tolist() == [[False, True, False], [False, False, True]]
    assert context.rows(1, 3) is context.rows(1, 3), "made once, so that its layouts are too"


def test_positions_count_real_tokens() -> None:
    assert positions_from_mask(torch.tensor([[0, 0, 1, 1], [1, 1, 0, 0]])).tolist() == [
        [0, 0, 0, 1],
        [0, 1, 1, 1],
    ]


@pytest.mark.parametrize(
    ("pattern", "distance_range"),
    [
        (Window(5, 2), (-2, 5)),
        (Window(5, 0, dilation=3), (0, 15)),
        (Global(1), None),
        (Window(5) & Window(9, 1), (-1, 5)),
        (Window(5) & Global(1), (-5, 5)),
        (Window(5) | Window(9, 1), (-5, 9)),
        (Window(5) | Global(1), None),
    ],
    ids=str,
)
def test_the_range_of_distances(pattern: Pattern, distance_range: tuple[int, int] | None) -> None:
    assert pattern.structure.distances == distance_range
    context = Context(30, 30).within_distances(distance_range)
    assert context.distances == ((-29, 29) if distance_range is None else distance_range)
    assert context.within_distances(distance_range) is context.within_distances(distance_range), (
        "layers share it"
    )
    mask = dense(pattern, context, 1, 1)[0, 0]
    distance = context.distance(torch.arange(30).view(-1, 1), torch.arange(30))[mask]
    assert context.distances[0] <= distance.min()
    assert distance.max() <= context.distances[1]
