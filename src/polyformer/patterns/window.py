"""Sliding windows: each query sees the keys near it."""

import dataclasses
from typing import ClassVar

from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.patterns.base import Pattern
from polyformer.patterns.layout import Keys, clip
from polyformer.sequence.context import Context


@dataclasses.dataclass(frozen=True)
class Window(Pattern):
    """The `before` keys before a query, itself, and the `after` keys after it, every `dilation`-th one.

    The token itself is counted apart: `Window(256)` sees 256 + 1 + 256 = 513 keys and `Window(255, 0)` is
    the causal window of 256. With a dilation d the reach is d times as far over as many keys.

    Raises `InputError` for negative widths, an empty window or a dilation below 1.
    """

    before: int
    after: int | None = None  # by default as many as `before`
    dilation: int = 1

    paper: ClassVar[str] = "Beltagy et al. 2020 (Longformer), section 3.1"

    def __post_init__(self) -> None:
        if self.after is None:
            object.__setattr__(self, "after", self.before)
        if self.before < 0 or self.keys_after < 0:
            raise InputError(
                f"Window: before and after count keys, expected 0 or more, got {self.before}, {self.after}"
            )
        if self.before == 0 and self.keys_after == 0:
            raise InputError(
                "Window: a window of 0 keys on both sides sees only the token itself; give at least 1"
            )
        if self.dilation < 1:
            raise InputError(f"Window: dilation is a step in keys, expected 1 or more, got {self.dilation}")

    @property
    def keys_after(self) -> int:
        """`after`, once settled."""
        assert self.after is not None
        return self.after

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """-after <= (i - j) / dilation <= before, in whole steps."""
        d = context.distance(q_idx, kv_idx)
        near = (d <= self.before * self.dilation) & (d >= -self.keys_after * self.dilation)
        return near if self.dilation == 1 else near & (d % self.dilation == 0)

    def keys(self, context: Context, start: int, stop: int) -> Keys:
        """One interval; without a mask only where the dilation is 1."""
        first, last = start + context.offset, stop - 1 + context.offset
        left, right = self.before * self.dilation, self.keys_after * self.dilation
        some = clip(first - left, last + right + 1, context.kv_len)
        full = clip(last - left, first + right + 1, context.kv_len) if self.dilation == 1 else ()
        return Keys(some, full)

    def distance_range(self) -> tuple[int, int]:
        """-after * dilation .. before * dilation."""
        return -self.keys_after * self.dilation, self.before * self.dilation

    def step(self) -> int:
        """dilation."""
        return self.dilation

    def in_residue_class(self, stride: int) -> Pattern | None:
        """A window of neighbours: the dilation is gone."""
        before, after = (count * self.dilation // stride for count in (self.before, self.keys_after))
        if stride % self.dilation or not (before or after):
            return None
        return Window(before, after)

    def relative(self, context: Context) -> bool:
        """Always."""
        return True

    @classmethod
    def examples(cls) -> tuple["Window", ...]:
        """Small instances that the contract tests run."""
        return cls(3), cls(4, 0), cls(0, 2), cls(2, 1, dilation=3)
