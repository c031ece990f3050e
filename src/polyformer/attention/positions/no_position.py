"""No positions: sufficient for a causal decoder, and a baseline for every scheme."""

import dataclasses
from typing import ClassVar

from polyformer.attention.positions.base import Position, PositionConfig, Shape


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoPositionConfig(PositionConfig):
    """No positions: the model gets no vectors or biases for positions."""

    kind: ClassVar[str] = "none"

    def build(self, shape: Shape) -> Position:
        return Position()
