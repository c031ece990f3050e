"""The parameters of tiles on a device."""

import dataclasses

from polyformer.core.config import Config
from polyformer.core.errors import InputError

BLOCKS = (64, 128, 192, 256, 512)
"""Possible numbers of queries per row on a CPU."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TileSizes(Config):
    """Parameters of the division of a call into tiles; costs in nanoseconds, or in any other unit."""

    blocks: tuple[int, ...] = BLOCKS  # possible numbers of queries per row
    prices: tuple[float, ...] = (1.0, 0.82, 0.75, 0.74, 0.73)  # cost per score, for each of the blocks
    start: float = 1.5e4  # cost of starting a tile
    asked: float = 8.0  # cost of evaluating a mask for a single pair of query and key
    width: int = 1024  # largest number of keys in a tile
    entries: int = 1 << 18  # largest number of scores in a tile, over all heads that are computed together

    def __post_init__(self) -> None:
        if len(self.prices) != len(self.blocks) or not self.blocks:
            raise InputError(f"prices: expected one for each of the blocks {self.blocks}, got {self.prices}")
        for name in ("width", "entries"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}: expected 1 or more, got {getattr(self, name)}")
        if min(*self.blocks, *self.prices, self.start + 1, self.asked + 1) <= 0:
            raise InputError("expected blocks and prices above 0, start and asked of 0 or more")


CUDA = TileSizes(blocks=(128, 512, 1024), prices=(1.0, 1.0, 1.0), start=1e7, width=4096, entries=1 << 26)
"""Estimates for a GPU, where starting an operation costs more than the scores of small tiles."""
