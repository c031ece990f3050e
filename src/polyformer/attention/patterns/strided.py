"""Strided attention: every `stride`-th key, counted from the query.

    i sees j  if  (i - j) % stride == 0

Child et al. 2019 (Sparse Transformer), section 4.2 and figure 3b: one head sees the last `stride` positions,
`Window(stride, 0)`, another head every `stride`-th position, so that two steps reach every position. The
three integrations of section 4.3, for a decoder:

    PerLayer([Window(128, 0), Strided(128)])      layers alternate
    Window(128, 0) | Strided(128)                 merged: every head sees both parts
    PerHead([Window(128, 0), Strided(128)])       heads differ

With `recompute`, a stack recomputes its activations in the backward pass (section 5.4). Cost: n / stride keys
per query, so a stride near sqrt(n) gives O(n sqrt(n)) in total.
"""

import dataclasses
from typing import ClassVar

from torch import Tensor

from polyformer.attention.patterns.base import Pattern
from polyformer.attention.patterns.implied import Full
from polyformer.attention.patterns.layout import Keys, clip, unite
from polyformer.attention.patterns.structure import Structure
from polyformer.core.ranges import PositiveInt
from polyformer.core.sequence.context import Context


@dataclasses.dataclass(frozen=True)
class Strided(Pattern):
    """Strided pattern: a query sees itself and every `stride`-th key; on both sides unless it is causal.

    Raises `InputError` for a stride below 1.
    """

    stride: PositiveInt

    paper: ClassVar[str] = "Child et al. 2019 (Sparse Transformer), section 4.2"

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return whether (i - j) % stride == 0."""
        return context.distance(q_idx, kv_idx) % self.stride == 0

    def keys(self, context: Context, start: int, stop: int) -> Keys:
        """Return an interval as wide as the row at every stride, together all keys for wide rows."""
        width, length = stop - start, context.kv_len
        # The keys of `stride` neighbouring queries together are all keys.
        if width >= self.stride:
            everything = clip(0, length, length)
            return Keys(everything, everything if self.stride == 1 else ())
        # Query i sees the keys congruent to i; the row sees `width` neighbouring residues.
        first = (start + context.offset) % self.stride
        some = unite(
            (max(0, begin), min(begin + width, length))
            for begin in range(first - self.stride, length, self.stride)
        )
        return Keys(some, some if width == 1 else ())

    @property
    def structure(self) -> Structure:
        """Multiples of `stride`, at any distance."""
        return Structure(step=self.stride, by_distance=True)

    def in_residue_class(self, stride: int) -> Pattern | None:
        """Return full attention if all tokens of a class are multiples of the stride apart, else None."""
        return Full() if stride % self.stride == 0 else None

    @classmethod
    def examples(cls) -> tuple["Strided", ...]:
        return cls(3), cls(70)

    @classmethod
    def picture(cls) -> tuple["Strided", Context]:
        """Return every eighth key."""
        return cls(8), Context(48, 48)
