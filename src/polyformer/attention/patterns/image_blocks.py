"""Local attention in images: query blocks with memory blocks (Parmar et al. 2018), and neighbourhoods.

An image is a sequence of its pixels in raster order, the colour channels of a pixel one after another. All
queries of a query block see the same memory block: the query block and the pixels before it. In a decoder the
context hides later pixels. The place of a token is its position in its document, so the start token of a
decoder is at pixel 0 and every token is at the pixel that it predicts (the paper's shift to the right). A
sequence may have one token more than the image has pixels, which is the last pixel.

If the context describes the image (`Context.image`, in a Vision Transformer), the pixels are its patches.
They follow the class token, which has no place in the image: it sees everything and everything sees it.

Cost: one key per pixel of the memory block for each query, for any image size.

Deviation: the paper generates block by block, so that a query sees all of the blocks to its left. Here the
order is always the raster order, so that caches and causality work as usual, and the rows below the query's
row are hidden.
"""

import dataclasses
import math
from typing import ClassVar

import torch
from torch import Tensor

from polyformer.attention.patterns.base import Pattern
from polyformer.attention.patterns.layout import Interval, Keys, clip, intersect, unite
from polyformer.core.errors import InputError, quote
from polyformer.core.ranges import NonNegativeInt, PositiveInt
from polyformer.core.sequence.context import Context


@dataclasses.dataclass(frozen=True)
class _LocalBlocks(Pattern):
    """Base of both patterns: converts places in the image to slots."""

    def visible_places(self, first: int, stop: int) -> Keys:
        """Return the places that queries at first <= place < stop need."""
        raise NotImplementedError

    def sees(self, query: Tensor, key: Tensor) -> Tensor:
        """Return whether the place `key` is in the memory block of the place `query`."""
        raise NotImplementedError

    def check(self, context: Context) -> None:
        """Raise `InputError` if the tokens do not match the image."""

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return whether sees(place of i, place of j), or i or j is a token before the image."""
        self.check(context)
        first = _tokens_before_image(context)
        query = context.query_position(b, q_idx) - first
        key = query - context.distance(q_idx, kv_idx)  # other documents are masked
        seen = self.sees(query, key) & (key >= 0)
        # Tokens before the image have negative places: they see and are seen by everything.
        return seen | (query < 0) | ((key < 0) & (key >= -first)) if first else seen

    def cuts(self, context: Context) -> tuple[int, ...]:
        """Return the query that is the first patch."""
        return (_tokens_before_image(context) - context.offset,) if _tokens_before_image(context) else ()

    def keys(self, context: Context, start: int, stop: int) -> Keys:
        """Return the slots of the places from `visible_places`."""
        self.check(context)
        if context.q_pos is None:
            return self._document_keys(context, 0, start + context.offset, stop + context.offset)
        if torch.compiler.is_compiling():  # a tensor cannot be read while a graph is traced
            return super().keys(context, start, stop)
        return self._keys_by_document(context, start, stop)

    def _keys_by_document(self, context: Context, start: int, stop: int) -> Keys:
        """Return the slots if documents begin at different slots: one result per beginning, joined."""
        q_pos = context.q_pos
        assert q_pos is not None
        pos = context.once("q_pos on the CPU", lambda: q_pos.reshape(-1, context.q_len).cpu())[:, start:stop]
        # Slot minus position: the slot at which the document of each query begins.
        begins = torch.arange(start, stop) + context.offset - pos
        per_begin: list[Keys] = []
        for begin in begins.unique().tolist():
            own_positions = pos[begins == begin]
            per_begin.append(
                self._document_keys(context, begin, int(own_positions.min()), int(own_positions.max()) + 1)
            )
        full = per_begin[0].full
        for keys in per_begin[1:]:
            full = intersect(full, keys.full)
        return Keys(unite([interval for keys in per_begin for interval in keys.some]), full)

    def _document_keys(self, context: Context, begin: int, start: int, stop: int) -> Keys:
        """Return the slots of a document that queries at positions start <= p < stop need.

        The document begins at slot `begin`.
        """
        first, everything = _tokens_before_image(context), ((0, context.kv_len),)
        if stop <= first:
            return Keys(everything, everything)
        places = self.visible_places(max(start - first, 0), stop - first)
        keys = _slots(places, begin + first, context.kv_len)
        if not first:
            return keys
        before = clip(begin, begin + first, context.kv_len)
        keys = keys | Keys(before, before)
        return Keys(everything, keys.full) if start < first else keys


@dataclasses.dataclass(frozen=True)
class Local1D(_LocalBlocks):
    """Local 1D attention: blocks of `query_block` pixels see themselves and `memory` pixels before them.

    Raises `InputError` for a block of no pixel or a negative memory.
    """

    query_block: PositiveInt
    memory: NonNegativeInt

    paper: ClassVar[str] = "Parmar et al. 2018 (Image Transformer), section 4.2.1"

    def sees(self, query: Tensor, key: Tensor) -> Tensor:
        """Return whether block - memory <= key < block + query_block, with block the first place of the
        query's block.
        """
        # The first place of the query's block.
        block = query // self.query_block * self.query_block
        return (key >= block - self.memory) & (key < block + self.query_block)

    def visible_places(self, first: int, stop: int) -> Keys:
        """Return the places from `memory` before the first block to the end of the last block."""
        size = self.query_block
        block, last = first // size * size, (stop - 1) // size * size
        # From the first block's memory to the last block's end; `full` is what all blocks share.
        some, full = (block - self.memory, last + size), (last - self.memory, block + size)
        return Keys((some,), (full,) if full[0] < full[1] else ())

    @classmethod
    def examples(cls) -> tuple["Local1D", ...]:
        return cls(4, 3), cls(7, 16)


@dataclasses.dataclass(frozen=True)
class Local2D(_LocalBlocks):
    """Local 2D attention: blocks of h x w pixels see themselves and pixels above, left and right of them.

    `shape`: (height, width) or (height, width, channels). `query`: (h, w). `memory`: (above, left, right).
    Blocks are cut off at the edges. One token more than the image has pixels is accepted, for a start token;
    more raise `InputError`. A shorter sequence is the beginning of an image.
    """

    shape: tuple[int, ...]
    query: tuple[int, int]
    memory: tuple[int, int, int]

    paper: ClassVar[str] = "Parmar et al. 2018 (Image Transformer), section 4.2.2"

    def __post_init__(self) -> None:
        _check_numbers(self, "shape", (2, 3), 1)
        _check_numbers(self, "query", (2,), 1)
        _check_numbers(self, "memory", (3,), 0)

    @property
    def channels(self) -> int:
        """Number of tokens per pixel."""
        return self.shape[2] if len(self.shape) == 3 else 1

    def check(self, context: Context) -> None:
        """Raise `InputError` for an image of another shape, or more tokens than pixels plus a start token."""
        _check_shape(self, self.shape, context)

    def sees(self, query: Tensor, key: Tensor) -> Tensor:
        """Return whether the pixel `key` is in the rectangle around the block of the pixel `query`."""
        (height, width), (above, left, right) = self.query, self.memory
        line = self.shape[1] * self.channels
        # First row and first column of the query's block.
        top = query // line // height * height
        side = query % line // self.channels // width * width
        row, column = key // line, key % line // self.channels
        inside = (row >= top - above) & (row < top + height)
        return inside & (column >= side - left) & (column < side + width + right)

    def visible_places(self, first: int, stop: int) -> Keys:
        """Return, for each row of the image, the rectangles that its columns need."""
        line, some, full = self.shape[1] * self.channels, [], None
        for row in range(first // line, (stop - 1) // line + 1):
            begin, end = max(first - row * line, 0), min(stop - row * line, line)
            keys = self._row_keys(row, begin // self.channels, (end - 1) // self.channels)
            some.extend(keys.some)
            # Only keys that the queries of all rows see need no mask.
            full = keys.full if full is None else intersect(full, keys.full)
        return Keys(unite(some), full or ())

    def _row_keys(self, row: int, first: int, last: int) -> Keys:
        """Return the places that the columns first <= column <= last of one row of the image need."""
        (height, width), (above, left, right) = self.query, self.memory
        top = row // height * height
        rows = range(max(top - above, 0), top + height)
        begin, end = first // width * width, last // width * width
        # Over all columns of the row: the widest rectangle, and the narrowest.
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
        return cls((1300, 13), (2, 5), (3, 2, 1)), cls((1100, 5, 3), (3, 2), (1, 1, 0))

    @classmethod
    def picture(cls) -> tuple["Local2D", Context]:
        """Return an image of 8 x 8."""
        return cls((8, 8), (2, 4), (2, 2, 2)), Context(64, 64)


@dataclasses.dataclass(frozen=True)
class Neighbourhood(_LocalBlocks):
    """Neighbourhood attention: each place of an image or a video sees the places around it.

    These are `kernel` places along every side. Near an edge the neighbourhood is moved inside, so that all
    places see equally many.

    `shape`: (height, width) or (frames, height, width). `kernel`: odd, and at most the smallest side. A
    shorter sequence is the beginning of an image.
    """

    shape: tuple[int, ...]
    kernel: PositiveInt

    paper: ClassVar[str] = "Hassani et al. 2023 (NAT), section 3.1"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_numbers(self, "shape", (2, 3), 1)
        if self.kernel % 2 == 0 or self.kernel > min(self.shape):
            raise InputError(
                f"Neighbourhood: kernel: expected an odd number of at most {min(self.shape)}, the smallest "
                f"side of the shape, got {self.kernel}"
            )

    def check(self, context: Context) -> None:
        """Raise `InputError` for an image of another shape, or more tokens than places plus a start token."""
        _check_shape(self, self.shape, context)

    def sees(self, query: Tensor, key: Tensor) -> Tensor:
        """Return whether the place `key` is in the neighbourhood of the place `query` along every side."""
        seen = key >= 0
        for size in reversed(self.shape[1:]):
            seen = seen & self._near(query % size, key % size, size)
            query, key = query // size, key // size
        return seen & self._near(query, key, self.shape[0])

    def _near(self, query: Tensor, key: Tensor, size: int) -> Tensor:
        start = (query - self.kernel // 2).clamp(0, size - self.kernel)
        return (key >= start) & (key < start + self.kernel)

    def visible_places(self, first: int, stop: int) -> Keys:
        return self._keys(self.shape, first, stop)

    def _keys(self, shape: tuple[int, ...], first: int, stop: int) -> Keys:
        """Return the places that a run of places needs, in an image with these sides."""
        size, *inner = shape
        if not inner:
            left, right = self._window(first, size), self._window(stop - 1, size)
            return Keys(((left.start, right.stop),), clip(right.start, left.stop, size))
        line, some, full = math.prod(inner), [], None
        for row in range(first // line, (stop - 1) // line + 1):
            keys = self._keys(tuple(inner), max(first - row * line, 0), min(stop - row * line, line))
            begins = [y * line for y in self._window(row, size)]
            some += [(begin + a, begin + b) for begin in begins for a, b in keys.some]
            shared = tuple((begin + a, begin + b) for begin in begins for a, b in keys.full)
            # Only keys that the queries of all rows see need no mask.
            full = shared if full is None else intersect(full, shared)
        return Keys(unite(some), full or ())

    def _window(self, place: int, size: int) -> range:
        """Return the neighbourhood of a place along a side of this size."""
        start = min(max(place - self.kernel // 2, 0), size - self.kernel)
        return range(start, start + self.kernel)

    @classmethod
    def examples(cls) -> tuple["Neighbourhood", ...]:
        return cls((1700, 5), 3), cls((300, 5, 7), 3)

    @classmethod
    def picture(cls) -> tuple["Neighbourhood", Context]:
        """Return an image of 8 x 8."""
        return cls((8, 8), 3), Context(64, 64)


def _tokens_before_image(context: Context) -> int:
    """Return the number of tokens before the image."""
    return 0 if context.image is None else context.image.first


def _slots(keys: Keys, begin: int, length: int) -> Keys:
    """Convert places to slots; the image begins at slot `begin`."""

    def moved(intervals: tuple[Interval, ...]) -> tuple[Interval, ...]:
        return tuple(
            interval for a, b in intervals for interval in clip(max(a, 0) + begin, b + begin, length)
        )

    return Keys(moved(keys.some), moved(keys.full))


def _check_numbers(pattern: Pattern, name: str, counts: tuple[int, ...], least: int) -> None:
    """Make an option a tuple; raise `InputError` for another number of numbers, and for smaller ones."""
    value = getattr(pattern, name)
    whole = isinstance(value, tuple | list) and all(isinstance(number, int) for number in value)
    if not whole or len(value) not in counts or min(value) < least:
        expected = f"{' or '.join(map(str, counts))} whole numbers of {least} or more"
        raise InputError(f"{type(pattern).__name__}: {name}: expected {expected}, got {quote(value)}")
    object.__setattr__(pattern, name, tuple(value))


def _check_shape(pattern: Pattern, shape: tuple[int, ...], context: Context) -> None:
    """Raise `InputError` unless the tokens match an image of this shape."""
    name, size = type(pattern).__name__, "x".join(map(str, shape))
    if context.image is not None and shape != context.image[1:]:
        _, height, width = context.image
        raise InputError(
            f"{name}: shape: expected {height}x{width}, the rows and columns of patches, got {size}; "
            f"use shape=[{height}, {width}]"
        )
    if context.image is not None or (torch.compiler.is_compiling() and context.kv_pos is not None):
        return
    length = context.once("places in use", lambda: _places_in_use(context))
    if length > math.prod(shape) + 1:
        raise InputError(
            f"{name}: {length} tokens do not fit the shape {size}, which has {math.prod(shape)} places and "
            f"one for a start token; use the shape of your images"
        )


def _places_in_use(context: Context) -> int:
    """Return the last place of a non-padding token plus 1."""
    if context.kv_pos is None:
        return context.kv_len
    return int(context.kv_pos.max()) + 1 if context.kv_pos.numel() else 0
