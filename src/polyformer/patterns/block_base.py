"""What the patterns of blocks share: positions p with the same p // size see the same blocks of keys.

Blocks are counted in positions of the document, so padding, packing and caches change nothing. A layout costs
a few intervals a row, and where the blocks lie is found once for each context.
"""

import bisect
import dataclasses
from collections.abc import Iterable

import torch
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.patterns.base import Pattern
from polyformer.patterns.global_base import Side
from polyformer.patterns.implied import runs
from polyformer.patterns.layout import Interval, Keys, unite
from polyformer.sequence.context import Context


class BlockPattern(Pattern, named=False):
    """A pattern that says which blocks a block sees: `meets` for tensors of numbers, `met` for one number."""

    size: int

    def meets(self, context: Context, query: Tensor, key: Tensor) -> Tensor:
        """Whether the query blocks see the key blocks; the numbers broadcast."""
        raise NotImplementedError

    def met(self, context: Context, block: int, last: int) -> Iterable[int]:
        """The key blocks that a query block sees, among 0..last (others may be named too)."""
        raise NotImplementedError

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """meets(block of the query, block of the key), with block(p) = p // size."""
        query, key = context.query_position(b, q_idx), context.key_position(b, kv_idx)
        return self.meets(context, query // self.size, key // self.size)

    def keys(self, context: Context, start: int, stop: int) -> Keys:
        """The slots of the blocks that some, and that all, blocks of the queries meet."""
        if unreadable(context):
            return super().keys(context, start, stop)
        keys = places(context, "kv", self.size)
        seen = [
            set(self.met(context, block, keys.last))
            for block in places(context, "q", self.size).between(start, stop)
        ]
        some, full = set().union(*seen), seen[0].intersection(*seen) if seen else set()
        return Keys(
            unite(interval for block in some for interval in keys.some.get(block, ())),
            unite(interval for block in full for interval in keys.full.get(block, ())),
        )


def check_size(name: str, **sizes: int) -> None:
    """Raises `InputError` for a size in positions that is below 1."""
    for what, size in sizes.items():
        if size < 1:
            raise InputError(f"{name}: {what} counts positions, expected 1 or more, got {size}")


def unreadable(context: Context) -> bool:
    """Whether positions cannot be read, because a graph is being traced."""
    return torch.compiler.is_compiling() and (context.q_pos is not None or context.kv_pos is not None)


@dataclasses.dataclass(frozen=True)
class Places:
    """Where the blocks of one side lie.

    Args:
        starts, numbers: for each batch row (or one for all) where a run of equal numbers starts, and which.
        some, full: the slots of each block in at least one row, and those that it has in all rows.
        last: the greatest number.
    """

    starts: list[list[int]]
    numbers: list[list[int]]
    some: dict[int, list[Interval]]
    full: dict[int, list[Interval]]
    last: int

    def between(self, start: int, stop: int) -> set[int]:
        """The numbers of the blocks in slots start <= i < stop of any row."""
        blocks: set[int] = set()
        for starts, numbers in zip(self.starts, self.numbers):
            first = max(0, bisect.bisect_right(starts, start) - 1)
            blocks.update(numbers[first : bisect.bisect_left(starts, stop)])
        return blocks


def places(context: Context, side: Side, size: int) -> Places:
    """The blocks of `size` positions of the queries or the keys; found once for each context."""
    return context.once(("blocks", side, size), lambda: _places(context, side, size))


def _places(context: Context, side: Side, size: int) -> Places:
    positions, length, shift = side_of(context, side)
    if positions is None:
        edges = [0, *range(size - shift % size, length, size)] if length else []
        numbers = [(edge + shift) // size for edge in edges]
        intervals = _by_number(edges, numbers, length)
        return Places([edges], [numbers], intervals, intervals, max(numbers, default=-1))
    blocks = torch.div(positions, size, rounding_mode="floor")
    rows = [_runs_of_equals(row) for row in blocks]
    some: dict[int, list[Interval]] = {}
    for edges, numbers in rows:
        for number, intervals in _by_number(edges, numbers, length).items():
            some.setdefault(number, []).extend(intervals)
    agreed = torch.where((blocks == blocks[:1]).all(0), blocks[0], -1)
    full = _by_number(*_runs_of_equals(agreed), length) if len(rows) > 1 else some
    last = max((max(numbers, default=-1) for _, numbers in rows), default=-1)
    return Places([edges for edges, _ in rows], [numbers for _, numbers in rows], some, full, last)


def side_of(context: Context, side: Side) -> tuple[Tensor | None, int, int]:
    """Positions [R, T] on the CPU, None where they are the slots plus a shift; length and shift."""
    positions, length, shift = (
        (context.q_pos, context.q_len, context.offset) if side == "q" else (context.kv_pos, context.kv_len, 0)
    )
    if positions is not None:
        positions = (positions if positions.dim() == 2 else positions[None]).cpu()
    return positions, length, shift


def last_positions(context: Context) -> Tensor:
    """For each key slot the position of the last real token of its document, [B or 1, Tk], on the CPU."""
    slots = torch.arange(context.kv_len).unsqueeze(0)
    end = torch.full_like(slots, context.kv_len - 1)
    if context.kv_doc is not None:
        documents = context.kv_doc.cpu().contiguous()
        end = torch.searchsorted(documents, documents, right=True) - 1
    if context.kv_valid is not None:
        real = torch.where(context.kv_valid.bool().cpu(), slots, -1).cummax(1).values.clamp_min(0)
        end = real.gather(1, end.expand_as(real))
    positions, _, _ = side_of(context, "kv")
    if positions is None:
        return end
    rows = max(len(positions), len(end))
    return positions.expand(rows, -1).gather(1, end.expand(rows, -1))


def _runs_of_equals(row: Tensor) -> tuple[list[int], list[int]]:
    """Where the runs of equal numbers in a row [T] start, and the numbers."""
    changes = torch.ones_like(row, dtype=torch.bool)
    changes[1:] = row[1:] != row[:-1]
    edges = changes.nonzero().flatten()
    return edges.tolist(), row[edges].tolist()


def _by_number(edges: list[int], numbers: list[int], length: int) -> dict[int, list[Interval]]:
    intervals: dict[int, list[Interval]] = {}
    for start, stop, number in zip(edges, [*edges[1:], length], numbers):
        intervals.setdefault(number, []).append((start, stop))
    intervals.pop(-1, None)  # where the rows differ
    return intervals


def slots_where(context: Context, side: Side, period: int, least: int) -> Keys:
    """The slots whose position leaves a rest of `least` or more when divided by `period`."""

    def make() -> Keys:
        positions, length, shift = side_of(context, side)
        if positions is None:
            first = least - shift - (least - shift) // period * period - period
            some = unite(
                (max(0, start), min(start + period - least, length)) for start in range(first, length, period)
            )
            return Keys(some, some)
        chosen = positions % period >= least
        return Keys(runs(chosen.any(0)), runs(chosen.all(0)))

    return context.once(("rest", side, period, least), make)
