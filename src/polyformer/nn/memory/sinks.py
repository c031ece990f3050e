"""A bounded cache of the first and the latest tokens, with positions counted inside the cache.

    query i sees     the `length` latest tokens, itself included, and the first `first` tokens of its text
    distance(i, j) = i - j                  of the latest tokens
    distance(i, j) = min(i, C - 1) - j      of the first tokens before them, with C = first + length

A query is the last entry of a cache of C entries, so no distance exceeds C - 1 in a text of any length.
Trained models send the weight that they need nowhere to the first tokens, the attention sinks; without them
perplexity rises by orders of magnitude. Keys stay as they are. With RoPE a query is rotated further, by
C - 1 - i positions, for its products with the first tokens; terms by distance use the distances above. In
training the memory is a mask with these distances.

The distances depend only on the query, so one pass, chunks and single tokens give the same results. Memory
and time per token do not grow with the text. What left the cache is forgotten, except through the layers: L
layers see L `length` tokens back. Xiao et al. 2024, section 3.2.
"""

import dataclasses
from typing import ClassVar

from polyformer.attention.mechanisms import MechanismConfig
from polyformer.attention.positions import Position, Shape, SinkCache
from polyformer.core.ranges import PositiveInt
from polyformer.nn.memory.base import MemoryConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class SinksConfig(MemoryConfig):
    """Attention sinks: a cache of the first and the latest tokens, with positions counted inside the cache.

    Every layer has the first `first` and the latest `length` tokens of a text, the current token included.
    """

    first: PositiveInt = 4
    length: PositiveInt = 508

    kind: ClassVar[str] = "sinks"
    paper: ClassVar[str] = "Xiao et al. 2024 (StreamingLLM), section 3.2"
    segments: ClassVar[bool] = False

    @property
    def cache(self) -> SinkCache:
        """Return the cache of each layer."""
        return SinkCache(self.first, self.length)

    @classmethod
    def examples(cls) -> tuple["SinksConfig", ...]:
        """Return small caches, which the texts of tests exceed."""
        return cls(first=2, length=3), cls(first=1, length=1)

    def limited(self, mechanism: MechanismConfig) -> MechanismConfig:
        """Return the mechanism with only the first and the latest keys."""
        return mechanism.within(self.cache.pattern)

    def count_positions(self, position: Position) -> None:
        """Count positions inside the cache."""
        position.count_in_cache(self.cache)

    def build(self, shape: Shape) -> None:
        """Return None: the KV caches of the layers are the memory."""
        return
