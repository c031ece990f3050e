"""No memory: a state keeps the whole text so far, and training sees single segments."""

import dataclasses
from typing import ClassVar

from polyformer.attention.positions import Shape
from polyformer.nn.memory.base import MemoryConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoMemoryConfig(MemoryConfig):
    """No memory: each segment is trained without the segments before it."""

    kind: ClassVar[str] = "none"
    segments: ClassVar[bool] = False

    def build(self, shape: Shape) -> None:
        """Return None."""
        return
