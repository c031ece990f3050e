"""The work of `blocks` cut into tiles: a run of queries, the keys they need, where the mask must be asked.

A tile's keys are intervals of key slots laid side by side; a row with many keys has several tiles, so that
no tile is wider than `width` and memory stays linear whatever the pattern.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polyformer.core.context import Context
from polyformer.core.layout import Interval, Row, count, intersect, subtract
from polyformer.core.pattern import Pattern
from polyformer.core.patterns import Full
from polyformer.core.request import Request

LOG2E = 1 / math.log(2)

SIZES = (64, 1024), (256, 4096)
"""Queries per row and keys per tile at most, on a CPU (its cache holds a tile) and on a GPU."""

LISTED = 8
"""With more intervals than this, keys are picked by index instead of slice by slice."""


@dataclasses.dataclass(frozen=True)
class Tile:
    """Queries start <= i < stop and the key slots `keys`; the mask matters in the slots `masked` only."""

    start: int
    stop: int
    keys: tuple[Interval, ...]
    masked: tuple[Interval, ...]

    @property
    def width(self) -> int:
        """How many keys the tile has."""
        return count(self.keys)

    def columns(self) -> list[tuple[int, int]]:
        """Where the intervals `masked` stand among the tile's keys."""
        found, before = [], 0
        for start, stop in self.keys:
            inside = intersect(((start, stop),), self.masked)
            found.extend((before + a - start, before + b - start) for a, b in inside)
            before += stop - start
        return found


def tiles(row: Row, width: int) -> list[Tile]:
    """The tiles of one row of a layout, each at most `width` keys wide."""
    groups: list[list[Interval]] = [[]]
    room = width
    for start, stop in row.keys.some:
        while start < stop:
            if room == 0:
                groups.append([])
                room = width
            end = min(stop, start + room)
            groups[-1].append((start, end))
            room -= end - start
            start = end
    return [
        Tile(row.start, row.stop, tuple(keys), subtract(keys, row.keys.full)) for keys in groups if keys
    ]  # fmt: skip


def plan(pattern: Pattern, context: Context, block: int, width: int) -> tuple[tuple[Tile, ...], ...]:
    """The tiles of every row that sees anything; kept with the context, since all layers ask for the same."""

    def make() -> tuple[tuple[Tile, ...], ...]:
        rows = (tuple(tiles(row, width)) for row in pattern.layout(context, block))
        return tuple(row for row in rows if row)

    return context.once(("tiles", pattern, block, width), make)


def take(table: Tensor, keys: Sequence[Interval]) -> Tensor:
    """The rows `keys` of a table [N, Tk, D]; a view where they lie together."""
    if len(keys) == 1:
        return table[:, keys[0][0] : keys[0][1]]
    if len(keys) <= LISTED:
        return torch.cat([table[:, start:stop] for start, stop in keys], 1)
    return table.index_select(1, slots(keys, table.device))


def give(table: Tensor, keys: Sequence[Interval], gradient: Tensor) -> None:
    """Adds `gradient` [N, width, D] to the rows `keys` of a table [N, Tk, D]."""
    if len(keys) <= LISTED:
        for (start, stop), part in zip(keys, gradient.split([stop - start for start, stop in keys], 1)):
            table[:, start:stop] += part
    else:
        table.index_add_(1, slots(keys, table.device), gradient)


def slots(keys: Sequence[Interval], device: torch.device) -> Tensor:
    """The key slots of the intervals, one after the other."""
    return torch.cat([torch.arange(start, stop, device=device) for start, stop in keys])


class Masks:
    """Forbids what the pattern does not allow, asking it only where a layout could not say.

    A relative pattern has the same mask all along a diagonal, so one evaluation serves all those tiles.
    """

    def __init__(self, pattern: Pattern | None, context: Context) -> None:
        self.pattern, self.context = pattern, context
        self.known: dict[Any, list[tuple[int, int, Tensor]]] | None = None
        if pattern is not None and pattern.relative(context):
            self.known = {}

    def forbid(self, scores: Tensor, tile: Tile, b: Tensor, h: Tensor) -> Tensor:
        """`scores` [B, H, queries, keys] with minus infinity, in place, where the tile's mask says no."""
        if self.pattern is not None and tile.masked:
            for first, last, forbidden in self._forbidden(tile, b, h):
                scores[..., first:last].masked_fill_(forbidden, -torch.inf)
        return scores

    def _forbidden(self, tile: Tile, b: Tensor, h: Tensor) -> list[tuple[int, int, Tensor]]:
        if self.known is None:
            return self._ask(tile, b, h)
        key = (
            tile.stop - tile.start,
            tuple((x - tile.start, y - tile.start) for x, y in (*tile.keys, *tile.masked)),
        )
        if key not in self.known:
            self.known[key] = self._ask(tile, b, h)
        return self.known[key]

    def _ask(self, tile: Tile, b: Tensor, h: Tensor) -> list[tuple[int, int, Tensor]]:
        assert self.pattern is not None
        q_idx = torch.arange(tile.start, tile.stop, device=b.device).view(-1, 1)
        allowed = self.pattern.mask(self.context, b, h, q_idx, slots(tile.masked, b.device))
        columns = tile.columns()
        parts = (~allowed).split([last - first for first, last in columns], -1)
        return [(first, last, part) for (first, last), part in zip(columns, parts)]


class Part:
    """Some rows of the batch, with their tiles: keys as [N, Tk, D] and queries as [N, G, Tq, D].

    N counts batch rows times key heads, G the query heads of a key head; tiles of scores are
    [N, G * queries, keys], which the mods see as [B, H, queries, keys].
    """

    def __init__(self, request: Request, start: int, stop: int, generator: torch.Generator | None) -> None:
        self.request, self.batch, self.generator = request, slice(start, stop), generator
        device = request.q.device
        self.b = torch.arange(start, stop, device=device).view(-1, 1, 1, 1)
        self.h = torch.arange(request.q.shape[1], device=device).view(1, -1, 1, 1)
        self.factor = request.scale * (LOG2E if request.score_mod is None else 1.0)
        self.masks = Masks(request.pattern, request.context)
        self.rows = plan(
            request.pattern or Full(), request.context.rows(start, stop), *SIZES[device.type == "cuda"]
        )
        self.scratch: dict[str, Tensor] = {}

    def by_key(self, x: Tensor) -> Tensor:
        """[B, Hkv, Tk, D] as [N, Tk, D]."""
        return x[self.batch].flatten(0, 1)

    def by_query(self, x: Tensor) -> Tensor:
        """[B, H, Tq, D] as [N, G, Tq, D]."""
        return x[self.batch].unflatten(1, (self.request.k.shape[1], -1)).flatten(0, 1)

    def queries(self, x: Tensor, tile: Tile) -> Tensor:
        """The tile's queries of x [N, G, Tq, D], the heads of a group together: [N, G * queries, D]."""
        return x[:, :, tile.start : tile.stop].flatten(1, 2)

    def put(self, x: Tensor, tile: Tile, value: Tensor) -> None:
        """Writes [N, G * queries, D] to the tile's queries of x [N, G, Tq, D]."""
        x[:, :, tile.start : tile.stop] = value.view(*x.shape[:2], -1, x.shape[3])

    def scores(self, tile: Tile, queries: Tensor, keys: Tensor) -> Tensor:
        """Scores in base 2, minus infinity where nothing may be seen; a view of memory used again."""
        if self.request.score_mod is None:
            return self.forbid(tile, self.product("scores", queries, keys.mT))
        scores, *indices = self.raw(tile, queries, keys)
        return self.finish(tile, self.request.score_mod(scores, *indices))

    def raw(self, tile: Tile, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """What a score_mod receives: scores [B, H, queries, keys] and b, h, q_idx [queries, 1], kv_idx."""
        scores = self.tiled(tile, self.product("scores", queries, keys.mT))
        device = scores.device
        return (
            scores,
            self.b,
            self.h,
            torch.arange(tile.start, tile.stop, device=device).view(-1, 1),
            slots(tile.keys, device),
        )

    def finish(self, tile: Tile, value: Tensor) -> Tensor:
        """What a score_mod gave, in base 2 and masked: [N, G * queries, keys]."""
        shape = (len(self.b), self.request.q.shape[1], tile.stop - tile.start, tile.width)
        scores = (value * LOG2E).expand(shape).unflatten(1, (self.request.k.shape[1], -1))
        return self.forbid(tile, scores.flatten(2, 3).flatten(0, 1).contiguous())

    def forbid(self, tile: Tile, scores: Tensor) -> Tensor:
        """`scores` [N, G * queries, keys], masked in place."""
        self.masks.forbid(self.tiled(tile, scores), tile, self.b, self.h)
        return scores

    def tiled(self, tile: Tile, x: Tensor) -> Tensor:
        """[N, G * queries, keys] as [B, H, queries, keys]."""
        return x.view(-1, self.request.q.shape[1], tile.stop - tile.start, tile.width)

    def product(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        """a @ b for the largest products, in memory that every tile uses again."""
        shape = (a.shape[0], a.shape[1], b.shape[2])
        size = math.prod(shape)
        if name not in self.scratch or self.scratch[name].numel() < size:
            self.scratch[name] = a.new_empty(size)
        return torch.bmm(a, b, out=self.scratch[name][:size].view(shape))

    def kept(self, like: Tensor) -> Tensor:
        """1 / (1 - dropout) where a weight is kept, else 0; the same in forward and backward."""
        keep = 1.0 - self.request.dropout
        return torch.empty_like(like).bernoulli_(keep, generator=self.generator).div_(keep)
