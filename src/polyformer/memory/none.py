"""No memory: a state keeps all of the text so far, and training sees a segment at a time."""

import dataclasses
from typing import ClassVar

from polyformer.memory.base import MemoryConfig
from polyformer.position import Shape


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoMemoryConfig(MemoryConfig):
    """Nothing is built."""

    kind: ClassVar[str] = "none"

    def build(self, shape: Shape) -> None:
        """None."""
        return
