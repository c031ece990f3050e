"""How a device likes its tiles."""

import dataclasses

from polyformer.core.config import Config
from polyformer.core.errors import InputError

BLOCKS = (64, 128, 192, 256, 512)
"""How many queries a row may have on a CPU."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TileSizes(Config):
    """What decides how a call is cut into tiles; costs in nanoseconds, or in any other unit."""

    blocks: tuple[int, ...] = BLOCKS  # how many queries a row may have
    prices: tuple[float, ...] = (1.0, 0.82, 0.75, 0.74, 0.73)  # of one score, in rows of each of these sizes
    start: float = 1.5e4  # of starting a tile
    asked: float = 8.0  # of asking a mask about one key of one query
    width: int = 1024  # keys in a tile at most
    entries: int = 1 << 18  # scores in a tile, over all its heads, that are computed at once

    def __post_init__(self) -> None:
        if len(self.prices) != len(self.blocks) or not self.blocks:
            raise InputError(f"prices: expected one for each of the blocks {self.blocks}, got {self.prices}")
        for name in ("width", "entries"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}: expected 1 or more, got {getattr(self, name)}")
        if min(*self.blocks, *self.prices, self.start + 1, self.asked + 1) <= 0:
            raise InputError("expected blocks and prices above 0, start and asked of 0 or more")


CUDA = TileSizes(blocks=(128, 512, 1024), prices=(1.0, 1.0, 1.0), start=1e7, width=4096, entries=1 << 26)
"""Guessed for a GPU, where starting an operation costs more than the scores of small tiles."""
