"""Random blocks: each block of queries sees a few blocks of keys drawn at random, as in BigBird.

Block i draws `blocks` different blocks among the blocks before it (all of them if there are not more).
Visibility is mutual: if the context is not causal, block j also sees the blocks that drew j. A draw is a hash
of (seed, i, number of the draw), so it depends only on the place in the document: a longer text, padding or
packing do not change it, texts may have any length, and no random generator is used.

A decoder's query sees blocks * size keys (not counting its block). An encoder's query also sees the blocks
that drew its block: 2 * blocks * size keys on average, more in early blocks (about blocks * (1 + log(n / i))
blocks) and fewer in late blocks. Zaheer et al. 2020, section 2, draw `blocks` from the whole text on one side
only; halve `blocks` to compare at equal cost.

Heads and layers with the same seed share their blocks; `PerHead([Random(3, 64, 0), Random(3, 64, 1)])` varies
them per head, and `PerLayer` per layer.
"""

import dataclasses
import functools
from typing import Annotated, ClassVar, TypeVar

import torch
from annotated_types import Interval
from torch import Tensor

from polyformer.attention.patterns.block_base import BlockPattern
from polyformer.attention.patterns.structure import BlockNeeds, Structure
from polyformer.core.ranges import PositiveInt
from polyformer.core.sequence.context import Context

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
