"""No positions: sufficient for a causal decoder, and a baseline for every scheme."""

import dataclasses
from typing import ClassVar

from polyformer.attention.positions.base import Position, PositionConfig, Shape
from polyformer.attention.positions.sink_cache import SinkCache


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoPositionConfig(PositionConfig):
    """No positions: the model gets no vectors or biases for positions."""

    kind: ClassVar[str] = "none"

    def build(self, shape: Shape) -> "NoPosition":
        return NoPosition()


class NoPosition(Position):
    """The module without effect."""

    counts_in_cache = True

    def count_in_cache(self, cache: SinkCache) -> None:
        """Do nothing: no distance matters."""
