"""Patterns of blocks: positions p with the same block (p + shift) // size see the same blocks of keys.

    pattern                            a query of block I sees                       keys per query
    BlockWindow(size, before, after)   I - before .. I + after                        size for each of them
    Blockwise(size, permutation)       block permutation[I]                          size
    Links(size, table)                 the blocks in row I of the table              size for each of them
    Random(blocks, size, seed)         random blocks, and the blocks that drew I     blocks * size, or more
    Summary(stride, columns)           the last `columns` positions of every block   columns * n / stride
    Fixed(stride, columns)             block I, and the positions of `Summary`       the sum of both

Unlike in `Window`, all queries of a block see the same keys, so a tile of a layout needs no mask.

`Blockwise`: the identity is attention within a block; the cyclic shifts let blocks attend to other blocks.
Qiu et al. 2020 (BlockBERT), section 3.1, divide a text of fixed length n into one block per entry of the
permutation. Here the block size is fixed, and the permutation repeats for a longer text, within its next run
of blocks. A block that is mapped beyond the end of the text sees no keys. Shifted groups let neighbouring
blocks exchange tokens: in half of the heads blocks begin half a block earlier (Chen et al. 2024, LongLoRA,
section 3.2):

    PerHead([Blockwise(2048), Blockwise(2048, shift=1024)])

Deviation from LongLoRA: the first half block of a text is a block, and does not join the last half block.

`Random`: block I draws `blocks` different blocks among the blocks before it (all of them if there are not
more). Visibility is mutual: if the context is not causal, block J also sees the blocks that drew J. A draw is
a hash of (seed, I, number of the draw), so it depends only on the place in the document: a longer text,
padding or packing do not change it, texts may have any length, and no random generator is used. A decoder's
query sees blocks * size keys (not counting its block). An encoder's query also sees the blocks that drew its
block: 2 * blocks * size keys on average, more in early blocks (about blocks * (1 + log(n / I)) blocks) and
fewer in late blocks. Zaheer et al. 2020 (BigBird), section 2, draw `blocks` from the whole text on one side
only; halve `blocks` to compare at equal cost. Heads and layers with the same seed share their blocks;
`PerHead([Random(3, 64, 0), Random(3, 64, 1)])` varies them per head, and `PerLayer` per layer.

`Fixed`: the paper uses a stride of 128 and 8, 16 or 32 columns. The three integrations of Child et al. 2019
(Sparse Transformer), section 4.3, for a decoder:

    PerLayer([BlockWindow(128, 0, 0), Summary(128, 8)])     layers alternate
    Fixed(128, 8)                                           merged: every head sees both parts
    PerHead([BlockWindow(128, 0, 0), Summary(128, 8)])      heads differ
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Annotated, ClassVar, TypeVar

import torch
from annotated_types import Interval
from torch import Tensor

from polyformer.attention.patterns.base import Pattern, TabulatedPattern
from polyformer.attention.patterns.block_base import (
    BlockPattern,
    block_slots,
    periodic_slots,
    positions_are_traced,
)
from polyformer.attention.patterns.layout import BlockNeeds, Keys, Structure, unite
from polyformer.core.errors import InputError
from polyformer.core.host_values import tensor_on
from polyformer.core.ranges import NonNegativeInt, PositiveInt
from polyformer.core.sequence.context import Context
from polyformer.core.sequence.tokens import Reach


@dataclasses.dataclass(frozen=True)
class BlockWindow(BlockPattern):
    """Block window: a query sees its block of `size` positions, `before` earlier and `after` later blocks.

    `BlockWindow(64, 1, 1)` is BigBird's window of three blocks; with 0 and 0 it is attention within a block.
    Raises `InputError` for a size below 1 or negative numbers of blocks.
    """

    size: PositiveInt
    before: NonNegativeInt = 1
    after: NonNegativeInt = 1

    paper: ClassVar[str] = "Zaheer et al. 2020 (BigBird), appendix D"

    def sees_blocks(self, context: Context, query: Tensor, key: Tensor) -> Tensor:
        """Return whether -after <= query - key <= before, counted in blocks."""
        # query and key are numbers of blocks, not of positions.
        return (key >= query - self.before) & (key <= query + self.after)

    def visible_blocks(self, context: Context, block: int, last: int) -> range:
        """Return the blocks block - before .. block + after, clipped to the text."""
        return range(max(0, block - self.before), min(block + self.after, last) + 1)

    @property
    def structure(self) -> Structure:
        """Whole blocks before and after: the last position of a block reaches the first that it sees."""
        reach = Reach(self.size * (self.before + 1) - 1, by_position=True)
        blocks = BlockNeeds(self.size, self.before * self.size, self.after * self.size)
        return Structure(reach=reach, blocks=blocks)

    @classmethod
    def examples(cls) -> tuple["BlockWindow", ...]:
        return cls(3), cls(2, 2, 0)


@dataclasses.dataclass(frozen=True)
class Blockwise(TabulatedPattern, BlockPattern):
    """Blockwise attention: block i of `size` positions sees block `permutation[i]` and no other.

    `shift`: the number of positions by which blocks begin earlier, below `size`.

    Raises `InputError` for a size below 1, for another shift, and for anything but a permutation of 0, 1, ...
    """

    size: PositiveInt
    permutation: tuple[int, ...] = (0,)
    shift: NonNegativeInt = 0

    paper: ClassVar[str] = "Qiu et al. 2020 (BlockBERT), section 3.1"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "permutation", tuple(self.permutation))
        if not self.permutation or sorted(self.permutation) != list(range(len(self.permutation))):
            raise InputError(
                f"Blockwise: permutation: expected each of 0..{max(0, len(self.permutation) - 1)} once, "
                f"got {self.permutation}"
            )

        if self.shift >= self.size:
            raise InputError(f"Blockwise: shift: expected less than the size {self.size}, got {self.shift}")

    def with_tables(self, context: Context, device: torch.device) -> Pattern:
        """Return the lookup of the query block in the permutation."""
        return PermutedBlocks(self.size, tensor_on(self.permutation, device), self.shift)

    def visible_blocks(self, context: Context, block: int, last: int) -> tuple[int, ...]:
        """Return the block that the permutation names."""
        inside = block % len(self.permutation)
        return (block - inside + self.permutation[inside],)

    @staticmethod
    def heads(size: int, blocks: int, counts: Sequence[int]) -> tuple["Blockwise", ...]:
        """Return the paper's heads for `PerHead`: `counts[s]` of them with the cyclic shift by s blocks.

        `PerHead(Blockwise.heads(256, 2, (10, 2)))` is the paper's 10 : 2 for twelve heads: ten see their own
        block, two the other block. Raises `InputError` for more shifts than blocks, and for counts below 0.
        """
        if len(counts) > blocks or min(counts, default=-1) < 0:
            raise InputError(
                f"counts: expected at most {blocks} numbers of heads, one per shift, got {counts}"
            )
        # The cyclic shift by s sends block i to block i + s, modulo the number of blocks.
        shifts = [tuple((i + shift) % blocks for i in range(blocks)) for shift in range(len(counts))]
        return tuple(Blockwise(size, order) for order, count in zip(shifts, counts) for _ in range(count))

    @classmethod
    def examples(cls) -> tuple["Blockwise", ...]:
        return cls(3), cls(2, (1, 2, 0)), cls(4, shift=2)

    @classmethod
    def picture(cls) -> tuple["Blockwise", Context]:
        """Return four blocks, each attending to the next."""
        return cls(12, (1, 2, 3, 0)), Context(48, 48)


@dataclasses.dataclass(frozen=True, eq=False)
class PermutedBlocks(BlockPattern, named=False):
    """Blockwise attention with its permutation in a tensor [blocks]."""

    size: int
    permutation: Tensor
    shift: int = 0

    def sees_blocks(self, context: Context, query: Tensor, key: Tensor) -> Tensor:
        """Return whether permutation[query] == key, within one run of the permutation."""
        number = self.permutation.shape[0]
        # The first block of the query's run of the permutation, plus the target within the run.
        return query - query % number + self.permutation[query % number] == key


@dataclasses.dataclass(frozen=True)
class Links(TabulatedPattern, BlockPattern):
    """Block links: block i of `size` positions sees the blocks `table[i]`, or no block if it has no row.

    The random blocks of transformers' BigBird are copied as one `Links` per head. Raises `InputError` for a
    size below 1, an empty table and negative numbers.
    """

    size: PositiveInt
    table: tuple[tuple[int, ...], ...]

    paper: ClassVar[str] = "Zaheer et al. 2020 (BigBird), section 2"

    def __post_init__(self) -> None:
        super().__post_init__()
        rows: Iterable[Iterable[int]] = self.table
        table = tuple(tuple(sorted({int(block) for block in row})) for row in rows)
        if not table or any(row and row[0] < 0 for row in table):
            raise InputError(f"Links: table: expected a list of block numbers for each block, got {table}")
        object.__setattr__(self, "table", table)

    def with_tables(self, context: Context, device: torch.device) -> Pattern:
        """Return the lookup of query and key block in a matrix."""
        return LinkMatrix(self.size, self._matrix(device))

    def visible_blocks(self, context: Context, block: int, last: int) -> tuple[int, ...]:
        """Return table[block]."""
        return self.table[block] if block < len(self.table) else ()

    @property
    def structure(self) -> Structure:
        """The rows of the table."""
        rows = self.table
        return Structure(
            blocks=BlockNeeds(self.size, links=lambda count: [*rows, *[()] * (count - len(rows))][:count])
        )

    def _matrix(self, device: torch.device) -> Tensor:
        """Return the visible pairs, [blocks + 1, blocks + 1]; the last row and column are blocks beyond."""
        pairs = [(i, j) for i, row in enumerate(self.table) for j in row]
        matrix = torch.zeros(len(self.table) + 1, 2 + max([0, *(j for _, j in pairs)]), dtype=torch.bool)
        for i, j in pairs:
            matrix[i, j] = True
        return matrix.to(device, non_blocking=True)

    @classmethod
    def examples(cls) -> tuple["Links", ...]:
        return (cls(3, ((0,), (0, 2), (), (1, 3))),)

    @classmethod
    def picture(cls) -> tuple["Links", Context]:
        """Return six blocks with a few links."""
        return cls(8, ((0,), (0, 2), (5,), (1, 3, 4), (), (0, 5))), Context(48, 48)


@dataclasses.dataclass(frozen=True, eq=False)
class LinkMatrix(BlockPattern, named=False):
    """Block links in a matrix [blocks + 1, blocks + 1] of bool; its last row and column are False."""

    size: int
    matrix: Tensor

    def sees_blocks(self, context: Context, query: Tensor, key: Tensor) -> Tensor:
        """Return matrix[query, key]."""
        height, width = self.matrix.shape
        # Blocks beyond the table read the last row or column, which are False.
        return self.matrix[query.clamp_max(height - 1), key.clamp_max(width - 1)]


MAX_BLOCKS = 256
"""Most random blocks per block: each draw is compared with all earlier draws."""

Number = TypeVar("Number", int, Tensor)


@dataclasses.dataclass(frozen=True)
class Random(BlockPattern):
    """Random blocks: each block of queries sees a few random blocks of keys.

    There are `blocks` random blocks of `size` positions for every block.

    Raises `InputError` for a size or blocks below 1.
    """

    blocks: Annotated[int, Interval(ge=1, le=MAX_BLOCKS)] = 3
    size: PositiveInt = 64
    seed: int = 0

    paper: ClassVar[str] = "Zaheer et al. 2020 (BigBird), section 2"

    def sees_blocks(self, context: Context, query: Tensor, key: Tensor) -> Tensor:
        """Return whether key is in draws(query) or, if not causal, query is in draws(key)."""
        query, key = query.long(), key.long()
        seen = _is_in(key, self._draws(query))
        # A causal query cannot see the later blocks that drew its block.
        return seen if context.causal else seen | _is_in(query, self._draws(key))

    def visible_blocks(self, context: Context, block: int, last: int) -> set[int]:
        """Return the blocks drawn and, if not causal, the blocks that drew this block."""
        drawn = set(draws(self.blocks, self.seed, block))
        if context.causal:
            return drawn
        return drawn | context.once((self, last), lambda: self._drawers(last)).get(block, set())

    @property
    def structure(self) -> Structure:
        """The blocks drawn and the blocks that drew a block."""

        def links(count: int) -> list[tuple[int, ...]]:
            drawers = self._drawers(count - 1)
            drawn = (draws(self.blocks, self.seed, block) for block in range(count))
            return [tuple(sorted({*own, *drawers.get(block, ())})) for block, own in enumerate(drawn)]

        return Structure(blocks=BlockNeeds(self.size, links=links))

    def _drawers(self, last: int) -> dict[int, set[int]]:
        """Return, for each block, the later blocks up to `last` that drew it."""
        drawers: dict[int, set[int]] = {}
        for block in range(1, last + 1):
            for earlier in draws(self.blocks, self.seed, block):
                drawers.setdefault(earlier, set()).add(block)
        return drawers

    def _draws(self, block: Tensor) -> list[Tensor]:
        """Return `draws` for every entry of a tensor; -1 if a block has fewer draws."""
        drawn: list[Tensor] = []
        for number in range(self.blocks):
            top = block - self.blocks + number
            # The same steps as in `draws`, for all blocks at once.
            draw = _hash(self.seed, block, number) % (top.clamp_min(0) + 1)
            draw = torch.where(_is_in(draw, drawn), top, draw)
            drawn.append(torch.where(top < 0, -1, draw))
        return drawn

    @classmethod
    def examples(cls) -> tuple["Random", ...]:
        return cls(2, 3), cls(1, 2, seed=7)


@functools.lru_cache(maxsize=1 << 16)
def draws(blocks: int, seed: int, block: int) -> tuple[int, ...]:
    """Return up to `blocks` different numbers below `block`; all such sets are equally likely.

    Floyd's algorithm: the last of k draws is a random number up to the top, or the top if that number was
    already drawn.
    """
    drawn: list[int] = []
    for number in range(blocks):
        top = block - blocks + number
        if top >= 0:
            draw = _hash(seed, block, number) % (top + 1)
            drawn.append(top if draw in drawn else draw)
    return tuple(drawn)


def _is_in(draw: Tensor, others: list[Tensor]) -> Tensor:
    repeated = torch.zeros_like(draw, dtype=torch.bool)
    for other in others:
        repeated = repeated | (draw == other)
    return repeated


def _hash(seed: int, block: Number, number: int) -> Number:
    """Return 32 random bits for a draw."""
    return _scramble(block + _scramble(number + _scramble(seed & 0xFFFFFFFF) & 0xFFFFFFFF))


def _scramble(x: Number) -> Number:
    """Return a permutation of the 32-bit integers that scatters neighbours (xor-shifts and odd products)."""
    x = x & 0xFFFFFFFF
    # Masked to 32 bits after each product, so that Python integers and int64 tensors agree.
    x = (x ^ (x >> 16)) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ (x >> 15)) * 0x846CA68B & 0xFFFFFFFF
    return x ^ (x >> 16)


@dataclasses.dataclass(frozen=True)
class Summary(Pattern):
    """Summary columns: every query sees the last `columns` positions of every block of `stride`.

    Raises `InputError` for a stride or columns below 1 and for more columns than a block has.
    """

    stride: PositiveInt
    columns: PositiveInt = 1

    paper: ClassVar[str] = "Child et al. 2019 (Sparse Transformer), section 4.2"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.columns > self.stride:
            raise InputError(
                f"{type(self).__name__}: columns: expected at most the {self.stride} positions of a block, "
                f"got {self.columns}"
            )

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return whether j % stride >= stride - columns."""
        is_summary = context.key_position(b, kv_idx) % self.stride >= self.stride - self.columns
        # The second factor is always True; it adds the axis of the queries.
        return is_summary & (q_idx >= 0)

    def keys(self, context: Context, start: int, stop: int) -> Keys:
        """Return the last columns of every block, the same for every query."""
        if positions_are_traced(context):
            return super().keys(context, start, stop)
        return periodic_slots(context, "kv", self.stride, self.stride - self.columns)

    @classmethod
    def examples(cls) -> tuple["Summary", ...]:
        return cls(4), cls(3, 2)


@dataclasses.dataclass(frozen=True)
class Fixed(Summary):
    """Fixed pattern: a query sees its block of `stride` tokens, and the last `columns` of every block."""

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return whether j // stride == i // stride or j % stride >= stride - columns."""
        query, key = context.query_position(b, q_idx), context.key_position(b, kv_idx)
        own = query // self.stride == key // self.stride
        return own | super().allows(context, b, h, q_idx, kv_idx)

    def keys(self, context: Context, start: int, stop: int) -> Keys:
        """Return the queries' own blocks and the last columns of every block."""
        summaries = super().keys(context, start, stop)
        if positions_are_traced(context):
            return summaries
        blocks = block_slots(context, "q", self.stride).between(start, stop)
        own = block_slots(context, "kv", self.stride)
        some = (interval for block in blocks for interval in own.some.get(block, ()))
        # Queries of several blocks have no own block in common.
        full = (interval for block in blocks for interval in own.full.get(block, ()) if len(blocks) == 1)
        return Keys(unite((*summaries.some, *some)), unite((*summaries.full, *full)))
