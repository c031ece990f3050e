"""Intervals, and what every layout promises: it covers its mask, `full` is full, it is never dense (K7)."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_cases import LargestTensor, dense, patterns, random_context
from polyformer.attention.functional.backends.tiled.tiles import tiles
from polyformer.attention.patterns import Causal, Global, Pattern, Window
from polyformer.attention.patterns.layout import Interval, Keys, Row, clip, count, intersect, subtract, unite
from polyformer.core.sequence.context import Context
from registered import examples, registered

intervals = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=6).map(unite)


def members(runs: tuple[Interval, ...]) -> set[int]:
    """The slots in the intervals."""
    return {slot for start, stop in runs for slot in range(start, stop)}


def assert_tidy(runs: tuple[Interval, ...]) -> None:
    """Sorted, apart and not empty."""
    assert all(start < stop for start, stop in runs)
    assert all(first[1] < second[0] for first, second in itertools.pairwise(runs))


@given(intervals, intervals)
def test_intervals_are_sets(a: tuple[Interval, ...], b: tuple[Interval, ...]) -> None:
    for runs, expected in (
        (intersect(a, b), members(a) & members(b)),
        (unite((*a, *b)), members(a) | members(b)),
        (subtract(a, b), members(a) - members(b)),
    ):
        assert members(runs) == expected
        assert count(runs) == len(expected)
        assert_tidy(runs)


def test_clip_keeps_what_is_inside() -> None:
    assert clip(-3, 4, 10) == ((0, 4),)
    assert clip(8, 14, 10) == ((8, 10),)
    assert clip(10, 14, 10) == clip(-5, 0, 10) == clip(4, 4, 10) == ()


@given(intervals, intervals, st.integers(1, 9))
def test_tiles_hold_the_keys_of_their_row_in_order(
    some: tuple[Interval, ...], full: tuple[Interval, ...], width: int
) -> None:
    tiling = tiles(Row(3, 7, Keys(some, full)), width)
    assert [slot for tile in tiling for slot in sorted(members(tile.keys))] == sorted(members(some))
    for tile in tiling:
        assert (tile.start, tile.stop) == (3, 7)
        assert tile.width <= width
        assert members(tile.masked) == members(tile.keys) - members(full)
        keys = sorted(members(tile.keys))
        assert {keys[i] for a, b in tile.columns() for i in range(a, b)} == members(tile.masked)


def assert_covers(pattern: Pattern, context: Context, batch: int, block: int) -> None:
    """Every allowed pair is named, every pair called full is allowed, every query stands in one row."""
    mask = dense(pattern, context, batch, 2)
    rows = pattern.layout(context, block)
    assert [row.start for row in rows] == [0, *(row.stop for row in rows)][: len(rows)]
    assert rows[-1].stop == context.q_len
    for row in rows:
        assert row.stop - row.start <= block
        assert_tidy(row.keys.some)
        assert_tidy(row.keys.full)
        assert members(row.keys.some) | members(row.keys.full) <= set(range(context.kv_len))
        allowed = mask[:, :, row.start : row.stop].flatten(0, 2)
        assert set(allowed.any(0).nonzero().flatten().tolist()) <= members(row.keys.some), "a pair is missed"
        assert members(row.keys.full) <= set(allowed.all(0).nonzero().flatten().tolist()), "full is not full"


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    patterns,
    st.integers(1, 70),
    st.integers(0, 40),
    st.integers(1, 33),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_the_layout_covers_the_mask(
    pattern: Pattern, queries: int, past: int, block: int, documents: bool, padding: bool, early: bool
) -> None:
    torch.manual_seed(queries + past)
    keys = queries + past
    context = random_context(
        2, queries, keys, documents=documents, padding=padding, q_start=0 if early else None
    )
    assert_covers(pattern, context, 2, block)
    assert_covers(pattern, context.rows(1, 2), 1, block)


named = [example for cls in registered(Pattern.registry) for example in examples(cls)]


@pytest.mark.parametrize("pattern", named, ids=str)
def test_the_layout_of_every_registered_pattern_covers_its_mask(pattern: Pattern) -> None:
    torch.manual_seed(0)
    start = torch.tensor([[4], [11]])  # positions that start late, as after left padding
    shifted = Context(
        61,
        83,
        q_pos=(torch.arange(22, 83) - start).clamp_min(0),
        kv_pos=(torch.arange(83) - start).clamp_min(0),
    )
    for context in (random_context(2, 61, 83, documents=True, padding=True), shifted):
        for block in (7, 16, 128):
            assert_covers(pattern, context, 2, block)


@pytest.mark.parametrize("pattern", [*named, Window(8) | Global(2), Causal() & Window(9)], ids=str)
def test_layouts_are_never_dense(pattern: Pattern) -> None:
    lengths = (1024, 2048)
    for length in lengths:
        context = random_context(2, length, length, causal=pattern.causal(), documents=True, padding=True)
        with LargestTensor() as seen:
            rows = (pattern & Window(4)).layout(context, 64)
        assert seen.largest <= 4 * length
        assert len(rows) <= length // 64 + 64
        assert sum(len(row.keys.some) + len(row.keys.full) for row in rows) <= 2 * length
