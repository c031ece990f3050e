"""Local attention in images: query blocks, each with a memory block. Parmar et al. 2018 (Image Transformer).

An image is a sequence of its pixels in raster order, the colours of a pixel one after the other. All queries
of a query block see the same memory block, the query block itself and what lies before it; in a decoder the
context hides what comes later. The place of a token is its position in its document, so a decoder's start
token stands at pixel 0 and every token stands at the pixel that it predicts (the paper's shift to the right).
One token more than pixels is accepted, the last pixel itself.

Cost: a query has as many keys as the memory block has pixels, whatever the image's size.

Deviation: the paper generates block by block, and so a query sees all of the blocks to its left; here the
order is the raster's everywhere, so that caches and causality stay what they are, and the rows below the
query's are hidden.
"""

import dataclasses
import math
from typing import ClassVar

import torch
from torch import Tensor

from polyformer.core.errors import InputError, quote
from polyformer.patterns.base import Pattern
from polyformer.patterns.layout import Interval, Keys, clip, intersect, unite
from polyformer.sequence.context import Context


@dataclasses.dataclass(frozen=True)
class _Blocks(Pattern):
    """What both share: from places in the image to slots."""

    def near(self, first: int, stop: int) -> Keys:
        """The places that queries at first <= place < stop need."""
        raise NotImplementedError

    def check(self, context: Context) -> None:
        """Raises `InputError` where there are more tokens than places."""

    def keys(self, context: Context, start: int, stop: int) -> Keys:
        """The slots of the places that `near` names."""
        self.check(context)
        if context.q_pos is None:
            moved = start + context.offset, stop + context.offset
            return _slots(self.near(*moved), 0, context.kv_len)
        if torch.compiler.is_compiling():  # a tensor cannot be read while a graph is traced
            return super().keys(context, start, stop)
        return self._of_documents(context, start, stop)

    def _of_documents(self, context: Context, start: int, stop: int) -> Keys:
        """The same where rows and documents begin at slots of their own: one answer for every beginning."""
        q_pos = context.q_pos
        assert q_pos is not None
        pos = context.once("q_pos on the CPU", lambda: q_pos.reshape(-1, context.q_len).cpu())[:, start:stop]
        begins = torch.arange(start, stop) + context.offset - pos
        per_begin: list[Keys] = []
        for begin in begins.unique().tolist():
            mine = pos[begins == begin]
            per_begin.append(_slots(self.near(int(mine.min()), int(mine.max()) + 1), begin, context.kv_len))
        full = per_begin[0].full
        for keys in per_begin[1:]:
            full = intersect(full, keys.full)
        return Keys(unite([interval for keys in per_begin for interval in keys.some]), full)

    def places(self, context: Context, b: Tensor, q_idx: Tensor, kv_idx: Tensor) -> tuple[Tensor, Tensor]:
        """Where the queries and the keys stand; keys of the same document, for others are not asked for."""
        self.check(context)
        query = context.query_position(b, q_idx)
        return query, query - context.distance(q_idx, kv_idx)


@dataclasses.dataclass(frozen=True)
class Local1D(_Blocks):
    """The pixels in query blocks of `query_block`; each sees itself and the `memory` pixels before it.

    Raises `InputError` for a block of no pixel or a negative memory.
    """

    query_block: int
    memory: int

    paper: ClassVar[str] = "Parmar et al. 2018 (Image Transformer), section 4.2.1"

    def __post_init__(self) -> None:
        if self.query_block < 1:
            raise InputError(
                f"Local1D: query_block counts pixels, expected 1 or more, got {self.query_block}"
            )
        if self.memory < 0:
            raise InputError(f"Local1D: memory counts pixels, expected 0 or more, got {self.memory}")

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """block - memory <= place(j) < block + query_block, with block the first place of the block of i."""
        query, key = self.places(context, b, q_idx, kv_idx)
        block = query // self.query_block * self.query_block
        return (key >= 0) & (key >= block - self.memory) & (key < block + self.query_block)

    def near(self, first: int, stop: int) -> Keys:
        """From `memory` before the first block to the end of the last."""
        size = self.query_block
        block, last = first // size * size, (stop - 1) // size * size
        some, full = (block - self.memory, last + size), (last - self.memory, block + size)
        return Keys((some,), (full,) if full[0] < full[1] else ())

    @classmethod
    def examples(cls) -> tuple["Local1D", ...]:
        """Small instances that the contract tests run."""
        return cls(4, 3), cls(7, 16)


@dataclasses.dataclass(frozen=True)
class Local2D(_Blocks):
    """Query blocks of h x w pixels; each sees itself and `above`, `left` and `right` pixels around it.

    `shape`: (height, width) or (height, width, channels). `query`: (h, w). `memory`: (above, left, right).
    At the edges blocks are cut off. A token more than the image has pixels is accepted, for a start token;
    beyond that `InputError` is raised. Fewer are the beginning of an image.
    """

    shape: tuple[int, ...]
    query: tuple[int, int]
    memory: tuple[int, int, int]

    paper: ClassVar[str] = "Parmar et al. 2018 (Image Transformer), section 4.2.2"

    def __post_init__(self) -> None:
        for name, sizes, least in (("shape", (2, 3), 1), ("query", (2,), 1), ("memory", (3,), 0)):
            value = getattr(self, name)
            whole = isinstance(value, tuple | list) and all(isinstance(number, int) for number in value)
            if not whole or len(value) not in sizes or min(value) < least:
                expected = f"{' or '.join(map(str, sizes))} whole numbers of {least} or more"
                raise InputError(f"Local2D: {name}: expected {expected}, got {quote(value)}")
            object.__setattr__(self, name, tuple(value))

    @property
    def channels(self) -> int:
        """Tokens a pixel has."""
        return self.shape[2] if len(self.shape) == 3 else 1

    def check(self, context: Context) -> None:
        """Raises `InputError` where the tokens are more than the pixels and a start token."""
        if torch.compiler.is_compiling() and context.kv_pos is not None:
            return
        length = context.once("places in use", lambda: _length(context))
        if length > math.prod(self.shape) + 1:
            raise InputError(
                f"Local2D: {length} tokens do not fit the shape {'x'.join(map(str, self.shape))}, which has "
                f"{math.prod(self.shape)} places and one for a start token; give the shape of your images"
            )

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """The pixel of j lies in the rectangle around the block of i's pixel."""
        query, key = self.places(context, b, q_idx, kv_idx)
        (height, width), (above, left, right) = self.query, self.memory
        line = self.shape[1] * self.channels
        top = query // line // height * height
        side = query % line // self.channels // width * width
        row, column = key // line, key % line // self.channels
        inside = (row >= top - above) & (row < top + height) & (key >= 0)
        return inside & (column >= side - left) & (column < side + width + right)

    def near(self, first: int, stop: int) -> Keys:
        """Row by row of the image: the rectangles that its columns need."""
        line, some, full = self.shape[1] * self.channels, [], None
        for row in range(first // line, (stop - 1) // line + 1):
            begin, end = max(first - row * line, 0), min(stop - row * line, line)
            keys = self._of_row(row, begin // self.channels, (end - 1) // self.channels)
            some.extend(keys.some)
            full = keys.full if full is None else intersect(full, keys.full)
        return Keys(unite(some), full or ())

    def _of_row(self, row: int, first: int, last: int) -> Keys:
        """The places that the columns first <= column <= last of one row of the image need."""
        (height, width), (above, left, right) = self.query, self.memory
        top = row // height * height
        rows = range(max(top - above, 0), top + height)
        begin, end = first // width * width, last // width * width
        some = self._rectangle(rows, begin - left, end + width + right)
        return Keys(some, self._rectangle(rows, end - left, begin + width + right))

    def _rectangle(self, rows: range, left: int, right: int) -> tuple[Interval, ...]:
        columns = clip(left, right, self.shape[1])
        line = self.shape[1] * self.channels
        return unite(
            (row * line + a * self.channels, row * line + b * self.channels)
            for row in rows
            for a, b in columns
        )

    @classmethod
    def examples(cls) -> tuple["Local2D", ...]:
        """Small instances that the contract tests run."""
        return cls((1300, 13), (2, 5), (3, 2, 1)), cls((1100, 5, 3), (3, 2), (1, 1, 0))

    @classmethod
    def picture(cls) -> tuple["Local2D", Context]:
        """An image of 8 x 8."""
        return cls((8, 8), (2, 4), (2, 2, 2)), Context(64, 64)


def _slots(keys: Keys, begin: int, length: int) -> Keys:
    """Places to slots, where the image begins at slot `begin`."""

    def moved(intervals: tuple[Interval, ...]) -> tuple[Interval, ...]:
        return tuple(
            interval for a, b in intervals for interval in clip(max(a, 0) + begin, b + begin, length)
        )

    return Keys(moved(keys.some), moved(keys.full))


def _length(context: Context) -> int:
    """One more than the last place of a real token."""
    if context.kv_pos is None:
        return context.kv_len
    return int(context.kv_pos.max()) + 1 if context.kv_pos.numel() else 0
