"""The parameters of tiles on a device."""

import dataclasses

from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.ranges import NonNegativeFloat, PositiveFloat, PositiveInt

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
