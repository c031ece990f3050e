"""Strided attention: every `stride`-th key, counted from the query.

    i sees j  where  (i - j) % stride == 0

Child et al. 2019 (Sparse Transformer), section 4.2 and figure 3b: of two heads the one sees the last `stride`
positions, `Window(stride, 0)`, the other every `stride`-th, so that two steps reach everything. The three
integrations of section 4.3, for a decoder:

    PerLayer([Window(128, 0), Strided(128)])      layers take turns
    Window(128, 0) | Strided(128)                 one head sees what either would
    PerHead([Window(128, 0), Strided(128)])       heads differ

With `recompute` on a stack its activations are recomputed in the backward pass (section 5.4). Cost:
n / stride keys a query, so a stride near sqrt(n) gives O(n sqrt(n)) in all.
"""

import dataclasses
from typing import ClassVar

from torch import Tensor

from polyformer.patterns.base import Pattern
from polyformer.patterns.block_base import check_size
from polyformer.patterns.implied import Full
from polyformer.patterns.layout import Keys, clip, unite
from polyformer.sequence.context import Context


@dataclasses.dataclass(frozen=True)
class Strided(Pattern):
    """Keys at distances that `stride` divides, itself included, on both sides unless the context is causal.

    Raises `InputError` for a stride below 1.
    """

    stride: int

    paper: ClassVar[str] = "Child et al. 2019 (Sparse Transformer), section 4.2"

    def __post_init__(self) -> None:
        check_size("Strided", stride=self.stride)

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """(i - j) % stride == 0."""
        return context.distance(q_idx, kv_idx) % self.stride == 0

    def keys(self, context: Context, start: int, stop: int) -> Keys:
        """An interval of the width of the row at every stride; all keys for a row as wide as that."""
        width, length = stop - start, context.kv_len
        if width >= self.stride:
            everything = clip(0, length, length)
            return Keys(everything, everything if self.stride == 1 else ())
        first = (start + context.offset) % self.stride
        some = unite(
            (max(0, begin), min(begin + width, length))
            for begin in range(first - self.stride, length, self.stride)
        )
        return Keys(some, some if width == 1 else ())

    def step(self) -> int:
        """stride."""
        return self.stride

    def in_residue_class(self, stride: int) -> Pattern | None:
        """Dense: all tokens of a class are multiples of the stride apart."""
        return Full() if stride % self.stride == 0 else None

    def relative(self, context: Context) -> bool:
        """Always."""
        return True

    @classmethod
    def examples(cls) -> tuple["Strided", ...]:
        """Small instances that the contract tests run."""
        return cls(3), cls(70)

    @classmethod
    def picture(cls) -> tuple["Strided", Context]:
        """Every eighth key."""
        return cls(8), Context(48, 48)
