"""Base of the block patterns: positions p with the same (p + shift) // size see the same blocks of keys.

Blocks are counted in positions of the document, so padding, packing and caches do not change them. A layout
costs a few intervals per row, and the slots of the blocks are computed once per context.
"""

import bisect
import dataclasses
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.attention.patterns.base import Pattern
from polyformer.attention.patterns.global_base import Side
from polyformer.attention.patterns.implied import runs
from polyformer.attention.patterns.layout import Interval, Keys, unite
from polyformer.core.host_values import on_host
from polyformer.core.sequence.context import Context


class BlockPattern(Pattern, named=False):
    """A pattern over blocks of positions.

    `sees_blocks` compares tensors of block numbers; `visible_blocks` lists the key blocks of a query block.
    """

    size: int
    shift: int = 0

    def sees_blocks(self, context: Context, query: Tensor, key: Tensor) -> Tensor:
        """Return whether the query blocks see the key blocks; the numbers broadcast."""
        raise NotImplementedError

    def visible_blocks(self, context: Context, block: int, last: int) -> Iterable[int]:
        """Return the key blocks that a query block sees, among 0..last; may contain others too."""
        raise NotImplementedError

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return meets(block of the query, block of the key), with block(p) = (p + shift) // size."""
        query, key = context.query_position(b, q_idx), context.key_position(b, kv_idx)
        return self.sees_blocks(context, (query + self.shift) // self.size, (key + self.shift) // self.size)

    def keys(self, context: Context, start: int, stop: int) -> Keys:
        """Return the slots of the blocks that some, and of the blocks that all, blocks of the queries see."""
        if positions_are_traced(context):
            return super().keys(context, start, stop)
        keys = block_slots(context, "kv", self.size, self.shift)
        # `some` has a block that any query block sees, `full` a block that all of them see.
        seen = [
            set(self.visible_blocks(context, block, keys.last))
            for block in block_slots(context, "q", self.size, self.shift).between(start, stop)
        ]
        some, full = set().union(*seen), seen[0].intersection(*seen) if seen else set()
        return Keys(
            unite(interval for block in some for interval in keys.some.get(block, ())),
            unite(interval for block in full for interval in keys.full.get(block, ())),
        )


def positions_are_traced(context: Context) -> bool:
    """Return whether positions cannot be read, because a graph is being traced."""
    return torch.compiler.is_compiling() and (context.q_pos is not None or context.kv_pos is not None)


@dataclasses.dataclass(frozen=True)
class BlockSlots:
    """The slots of the blocks of one side, queries or keys.

    Args:
        starts, numbers: start and block number of each run of equal numbers, per batch row or for all rows.
        some, full: the slots of each block in at least one batch row, and in all batch rows.
        last: the greatest block number.
    """

    starts: list[list[int]]
    numbers: list[list[int]]
    some: dict[int, list[Interval]]
    full: dict[int, list[Interval]]
    last: int

    def between(self, start: int, stop: int) -> set[int]:
        """Return the numbers of the blocks in slots start <= i < stop of any row."""
        blocks: set[int] = set()
        for starts, numbers in zip(self.starts, self.numbers):
            # The run that contains slot `start` may begin before it.
            first = max(0, bisect.bisect_right(starts, start) - 1)
            blocks.update(numbers[first : bisect.bisect_left(starts, stop)])
        return blocks


def block_slots(context: Context, side: Side, size: int, shift: int = 0) -> BlockSlots:
    """Return the blocks of `size` positions of the queries or the keys; computed once per context."""
    return context.once(("blocks", side, size, shift), lambda: _block_slots(context, side, size, shift))


def _block_slots(context: Context, side: Side, size: int, moved: int) -> BlockSlots:
    positions, length, shift = side_positions(context, side)
    positions, shift = None if positions is None else positions + moved, shift + moved
    if positions is None:
        # Without a table, position = slot + shift, so the blocks are regular.
        edges = [0, *range(size - shift % size, length, size)] if length else []
        numbers = [(edge + shift) // size for edge in edges]
        intervals = _intervals_by_block(edges, numbers, length)
        return BlockSlots([edges], [numbers], intervals, intervals, max(numbers, default=-1))
    blocks = torch.div(positions, size, rounding_mode="floor")
    rows = [_runs_of_equals(row) for row in blocks]
    some: dict[int, list[Interval]] = {}
    for edges, numbers in rows:
        for number, intervals in _intervals_by_block(edges, numbers, length).items():
            some.setdefault(number, []).extend(intervals)
    # A slot can be `full` only where all batch rows have the same block.
    agreed = torch.where((blocks == blocks[:1]).all(0), blocks[0], -1)
    full = _intervals_by_block(*_runs_of_equals(agreed), length) if len(rows) > 1 else some
    last = max((max(numbers, default=-1) for _, numbers in rows), default=-1)
    return BlockSlots([edges for edges, _ in rows], [numbers for _, numbers in rows], some, full, last)


def side_positions(context: Context, side: Side) -> tuple[Tensor | None, int, int]:
    """Return positions [R, T] on the CPU (None if they are slots plus a shift), length and shift."""
    positions, length, shift = (
        (context.q_pos, context.q_len, context.offset) if side == "q" else (context.kv_pos, context.kv_len, 0)
    )
    if positions is not None:
        positions = (positions if positions.dim() == 2 else positions[None]).cpu()
    return positions, length, shift


def last_positions(context: Context) -> Tensor:
    """Return the last non-padding position in each key slot's document, [B or 1, Tk], on the CPU."""
    slots = torch.arange(context.kv_len).unsqueeze(0)
    end = torch.full_like(slots, context.kv_len - 1)
    if context.kv_doc is not None:
        documents = on_host(context.kv_doc).contiguous()
        # Document numbers are sorted within a row: bisection finds each document's last slot.
        end = torch.searchsorted(documents, documents, right=True) - 1
    if context.kv_valid is not None:
        real = torch.where(on_host(context.kv_valid).bool(), slots, 0)
        if context.kv_doc is None:  # ONNX has a maximum, but no running maximum
            end = F.pad(real, (1, 0)).amax(1, keepdim=True).expand_as(real)  # amax fails on zero slots
        else:
            end = real.cummax(1).values.gather(1, end.expand_as(real))
    positions, _, _ = side_positions(context, "kv")
    if positions is None:
        return end
    positions, end = torch.broadcast_tensors(positions, end)
    return positions.gather(1, end)


def _runs_of_equals(row: Tensor) -> tuple[list[int], list[int]]:
    """Return the starts of the runs of equal numbers in a row [T], and the numbers."""
    changes = torch.ones_like(row, dtype=torch.bool)
    # A run starts at slot 0 and wherever the number changes.
    changes[1:] = row[1:] != row[:-1]
    edges = changes.nonzero().flatten()
    return edges.tolist(), row[edges].tolist()


def _intervals_by_block(edges: list[int], numbers: list[int], length: int) -> dict[int, list[Interval]]:
    intervals: dict[int, list[Interval]] = {}
    for start, stop, number in zip(edges, [*edges[1:], length], numbers):
        intervals.setdefault(number, []).append((start, stop))
    intervals.pop(-1, None)  # -1 marks slots where the batch rows differ
    return intervals


def periodic_slots(context: Context, side: Side, period: int, least: int) -> Keys:
    """Return the slots with position % period >= least."""

    def make() -> Keys:
        positions, length, shift = side_positions(context, side)
        if positions is None:
            # The first interval may begin before slot 0; it is clipped below.
            first = least - shift - (least - shift) // period * period - period
            some = unite(
                (max(0, start), min(start + period - least, length)) for start in range(first, length, period)
            )
            return Keys(some, some)
        chosen = positions % period >= least
        return Keys(runs(chosen.any(0)), runs(chosen.all(0)))

    return context.once(("rest", side, period, least), make)
