"""No positions: what a causal decoder can do without, and a baseline for every scheme."""

import dataclasses
from typing import ClassVar

from polyformer.position.base import Position, PositionConfig, Shape


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoPositionConfig(PositionConfig):
    """The identity."""

    kind: ClassVar[str] = "none"

    def build(self, shape: Shape) -> Position:
        """The module of the scheme, for a whole stack."""
        return Position()
