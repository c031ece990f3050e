"""The tiles of backend `tiled`: a run of queries, the keys that they need, and the keys that need a mask.

The keys of a tile are concatenated intervals of key slots. A row with many keys has several tiles, so that no
tile is wider than `width` and memory is linear for every pattern. `TileSizes` has the limits
of a device.
"""

import collections
import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

from polyformer.attention.patterns.base import Pattern
from polyformer.attention.patterns.layout import Interval, Row, count, intersect, subtract
from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.ranges import NonNegativeFloat, PositiveFloat, PositiveInt
from polyformer.core.sequence.context import Bare, Context

BLOCKS = (64, 128, 192, 256, 512)
"""Possible numbers of queries per row on a CPU."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TileSizes(Config):
    """Parameters of the division of a call into tiles; costs in nanoseconds, or in any other unit."""

    blocks: tuple[PositiveInt, ...] = BLOCKS  # possible numbers of queries per row
    prices: tuple[PositiveFloat, ...] = (1.0, 0.82, 0.75, 0.74, 0.73)  # costs per score, by block
    start: NonNegativeFloat = 1.5e4  # cost of starting a tile
    asked: NonNegativeFloat = 8.0  # cost of evaluating a mask for a single pair of query and key
    width: PositiveInt = 1024  # largest number of keys in a tile
    entries: PositiveInt = 1 << 18  # largest number of scores in a tile, over all heads computed together

    def __post_init__(self) -> None:
        if len(self.prices) != len(self.blocks) or not self.blocks:
            raise InputError(f"prices: expected one for each of the blocks {self.blocks}, got {self.prices}")


CUDA = TileSizes(blocks=(128, 512, 1024), prices=(1.0, 1.0, 1.0), start=1e7, width=4096, entries=1 << 26)
"""Estimates for a GPU, where starting an operation costs more than the scores of small tiles."""


LISTED = 8
"""Largest number of intervals for which keys are read slice by slice instead of by index.

Each slice is an operation started by Python, some microseconds on any processor; an index is a single
operation that reads a number for each key.
"""


@dataclasses.dataclass(frozen=True)
class Tile:
    """Queries start <= i < stop and the key slots `keys`; only the slots `masked` need a mask."""

    start: int
    stop: int
    keys: tuple[Interval, ...]
    masked: tuple[Interval, ...]

    @property
    def width(self) -> int:
        """Return the number of keys of the tile."""
        return count(self.keys)

    def columns(self) -> list[tuple[int, int]]:
        """Return the columns of the intervals `masked` among the keys of the tile."""
        columns, before = [], 0
        inside = collections.deque(intersect(self.keys, self.masked))
        for start, stop in self.keys:
            while inside and inside[0][0] < stop:
                first, last = inside.popleft()
                columns.append((before + first - start, before + last - start))
            before += stop - start
        return columns


def tiles(row: Row, width: int) -> list[Tile]:
    """Return the tiles of a row of a layout, each at most `width` keys wide."""
    groups: list[list[Interval]] = [[]]
    room = width
    for start, stop in row.keys.some:
        while start < stop:
            # The tile has `width` keys: begin another.
            if room == 0:
                groups.append([])
                room = width
            end = min(stop, start + room)
            groups[-1].append((start, end))
            room -= end - start
            start = end
    return [Tile(row.start, row.stop, tuple(keys), subtract(keys, row.keys.full)) for keys in groups if keys]


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The tiles of a head, for each run of queries that sees a key.

    `room` is the largest number of heads to compute together, `scores` the number of scores of a head, and
    `asked` the number of scores that need an evaluation of the mask.
    """

    rows: tuple[tuple[Tile, ...], ...]
    room: int
    scores: int
    asked: int


def plan(pattern: Pattern, context: Context, heads: int, sizes: TileSizes) -> Tiling:
    """Return the plan for `heads` heads, counted over the batch rows.

    The context caches it because all layers need the same plan. If it depends only on lengths, it is cached
    across contexts.
    """
    # The plan depends on lengths only, so it is valid for every call with these lengths.
    if context.bare is not None and pattern.is_static():
        return _kept(pattern, context.bare, heads, sizes)
    return context.once(("tiles", pattern, heads, sizes), lambda: _plan(pattern, context, heads, sizes))


@functools.lru_cache(maxsize=512)
def _kept(pattern: Pattern, bare: Bare, heads: int, sizes: TileSizes) -> Tiling:
    return _plan(pattern, Context.from_bare(bare), heads, sizes)


def _plan(pattern: Pattern, context: Context, heads: int, sizes: TileSizes) -> Tiling:
    if context.q_len == 0:
        return Tiling((), 1, 0, 0)
    block, largest = _best(pattern, context, heads, sizes)
    rows = [tuple(tiles(row, _width(block, sizes))) for row in pattern.layout(context, block)]
    tiles_of_rows = [tile for row in rows for tile in row]
    scores = sum((tile.stop - tile.start) * tile.width for tile in tiles_of_rows)
    asked = sum((tile.stop - tile.start) * count(tile.masked) for tile in tiles_of_rows)
    return Tiling(tuple(row for row in rows if row), sizes.entries // max(1, largest), scores, asked)


def _best(pattern: Pattern, context: Context, heads: int, sizes: TileSizes) -> tuple[int, int]:
    """Return the cheapest number of queries per row, and the number of scores in a tile of a head.

    Rows of more queries compute more masked scores, rows of fewer queries start more tiles. The estimate uses
    the three rows of middle cost out of five: the first row, the last row or a row that sees all keys may be
    atypical.
    """
    options: dict[int, tuple[float, int]] = {}
    for block, price in zip(sizes.blocks, sizes.prices):
        queries = min(block, context.q_len)
        last = context.q_len - queries
        # Five sample rows at even distances, aligned to rows of this size.
        starts = (0, *(last * part // 4 // queries * queries for part in (1, 2, 3)), last)
        rows = (pattern.keys(context, start, start + queries) for start in starts)
        counts = sorted((count(keys.some), count(subtract(keys.some, keys.full))) for keys in rows)[1:4]
        width, masked = (sum(numbers) // 3 for numbers in zip(*counts))
        largest = queries * min(width, _width(block, sizes))
        together = max(1, min(heads, sizes.entries // max(1, largest)))
        # A relative pattern evaluates a mask per diagonal, which costs next to nothing.
        asked = 0 if pattern.structure.by_distance else sizes.asked * masked
        # Per query: starting its tiles, computing its scores, and evaluating its masks.
        cost = sizes.start * -(-heads // together) / queries + price * heads * width + asked
        options[block] = cost, largest
    block = min(options, key=lambda size: options[size][0])
    return block, options[block][1]


def _width(block: int, sizes: TileSizes) -> int:
    """Return the largest number of keys of a tile of `block` queries, so that it fits in `entries` scores."""
    return max(1, min(sizes.width, sizes.entries // block))


def take(table: Tensor, keys: tuple[Interval, ...]) -> Tensor:
    """Return the rows `keys` of a table [N, Tk, D], as a view if they are a single interval."""
    # A slice is a view: nothing is copied.
    if len(keys) == 1:
        return table[:, keys[0][0] : keys[0][1]]
    if len(keys) <= LISTED:
        return torch.cat([table[:, start:stop] for start, stop in keys], 1)
    return table.index_select(1, slots(keys, table.device))


def add_columns(table: Tensor, keys: tuple[Interval, ...], gradient: Tensor) -> None:
    """Add `gradient` [N, D, width] to the columns `keys` of a table [N, D, Tk]."""
    if len(keys) <= LISTED:
        for (start, stop), part in zip(keys, gradient.split([stop - start for start, stop in keys], 2)):
            table[:, :, start:stop] += part
    else:
        table.index_add_(2, slots(keys, table.device), gradient)


@functools.lru_cache(maxsize=4096)
def slots(keys: tuple[Interval, ...], device: torch.device) -> Tensor:
    """Return the key slots of the intervals, in turn."""
    return torch.cat([torch.arange(start, stop, device=device) for start, stop in keys])


Limits = list[tuple[int, int, Tensor]]
"""Limits for columns first <= j < last of a tile: infinity for allowed pairs, minus infinity for others."""


class Masks:
    """The masks of a pattern, evaluated only for keys that the layout does not decide.

    A relative pattern has the same mask for all tiles along a diagonal, so a single evaluation is enough for
    them. For other patterns the mask of a tile is cached for later heads if `keep`.
    """

    def __init__(self, pattern: Pattern | None, context: Context, keep: bool = False) -> None:
        self.pattern, self.context = pattern, context
        self.relative = pattern is not None and pattern.structure.by_distance
        self.known: dict[Any, Limits] | None = {} if self.relative or keep else None

    def forbid(self, scores: Tensor, tile: Tile, b: Tensor, h: Tensor, finite: bool = True) -> Tensor:
        """Set `scores` [B, H, queries, keys] of masked pairs to minus infinity in place, and return them.

        finite: whether no score is NaN; otherwise the faster method is wrong because a minimum keeps NaN.
        """
        if self.pattern is not None and tile.masked:
            for first, last, limit in self._limits(tile, b, h, scores.dtype):
                part = scores[..., first:last]
                if finite:
                    torch.minimum(part, limit, out=part)  # several times as fast as masked_fill_
                else:
                    part.masked_fill_(limit < 0, -torch.inf)
        return scores

    def _limits(self, tile: Tile, b: Tensor, h: Tensor, dtype: torch.dtype) -> Limits:
        if self.known is None:
            return self._ask(tile, b, h, dtype)
        key = tile
        # Tiles on a diagonal are equal up to the slot of their first query.
        if self.relative:
            key = (
                tile.stop - tile.start,
                tuple((x - tile.start, y - tile.start) for x, y in (*tile.keys, *tile.masked)),
            )
        if key not in self.known:
            limits = self._ask(tile, b, h, dtype)
            if not self.relative and any(limit.dim() > 2 for _, _, limit in limits):
                return limits  # with axes for batch rows and heads, so not valid for other work items
            self.known[key] = limits
        return self.known[key]

    def _ask(self, tile: Tile, b: Tensor, h: Tensor, dtype: torch.dtype) -> Limits:
        assert self.pattern is not None, "without a pattern nothing is masked"
        q_idx = torch.arange(tile.start, tile.stop, device=b.device).view(-1, 1)
        allowed = self.pattern.mask(self.context, b, h, q_idx, slots(tile.masked, b.device))
        if self.relative:  # the same for all batch rows and heads, so that any work item may use it
            allowed = allowed[(0,) * (allowed.dim() - 2)]
        limits = torch.full(allowed.shape, torch.inf, dtype=dtype, device=b.device).masked_fill_(
            ~allowed, -torch.inf
        )
        columns = tile.columns()
        parts = limits.split([last - first for first, last in columns], -1)
        return [(first, last, part) for (first, last), part in zip(columns, parts)]
