"""Sliding windows: each query sees the keys near it."""

import dataclasses
from typing import ClassVar

from torch import Tensor

from polyformer.attention.patterns.base import Pattern
from polyformer.attention.patterns.layout import Keys, clip
from polyformer.attention.patterns.structure import Structure
from polyformer.core.errors import InputError
from polyformer.core.ranges import NonNegativeInt, PositiveInt
from polyformer.core.sequence.context import Context


@dataclasses.dataclass(frozen=True)
class Window(Pattern):
    """Sliding window: a query sees itself, `before` keys before it and `after` after it, every `dilation`-th.

    The token itself is not counted: `Window(256)` sees 256 + 1 + 256 = 513 keys, `Window(255, 0)` is the
    causal window of 256, and `Window(0, 0)` sees only the token itself. With a dilation d the window reaches
    d times as far with the same number of keys.

    Raises `InputError` for negative widths, for `Window(0)` without an `after`, and for a dilation below 1.
    """

    before: NonNegativeInt
    after: NonNegativeInt | None = None  # by default equal to `before`
    dilation: PositiveInt = 1

    paper: ClassVar[str] = "Beltagy et al. 2020 (Longformer), section 3.1"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.after is None:
            if self.before == 0:
                raise InputError(
                    "Window: a window of 0 keys on both sides sees only the token itself; use 1 or more, "
                    "or Window(0, 0) if you want this"
                )
            object.__setattr__(self, "after", self.before)

    @property
    def keys_after(self) -> int:
        """The resolved value of `after`."""
        assert self.after is not None
        return self.after

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return whether -after <= (i - j) / dilation <= before, in whole steps."""
        # Positive for earlier keys.
        d = context.distance(q_idx, kv_idx)
        near = (d <= self.before * self.dilation) & (d >= -self.keys_after * self.dilation)
        return near if self.dilation == 1 else near & (d % self.dilation == 0)

    def keys(self, context: Context, start: int, stop: int) -> Keys:
        """Return one interval; it needs no mask only if the dilation is 1."""
        # The slots of the first and the last query of the row.
        first, last = start + context.offset, stop - 1 + context.offset
        left, right = self.before * self.dilation, self.keys_after * self.dilation
        some = clip(first - left, last + right + 1, context.kv_len)
        full = clip(last - left, first + right + 1, context.kv_len) if self.dilation == 1 else ()
        return Keys(some, full)

    @property
    def structure(self) -> Structure:
        """The distances from -after * dilation to before * dilation."""
        return Structure.within(-self.keys_after * self.dilation, self.before * self.dilation, self.dilation)

    def in_residue_class(self, stride: int) -> Pattern | None:
        """Return the window over neighbours; None unless `stride` is a multiple of the dilation."""
        if stride % self.dilation:
            return None
        # The reach in slots divided by the distance of neighbours in a class.
        return Window(*(count * self.dilation // stride for count in (self.before, self.keys_after)))

    @classmethod
    def examples(cls) -> tuple["Window", ...]:
        return cls(3), cls(4, 0), cls(0, 2), cls(0, 0), cls(2, 1, dilation=3)
