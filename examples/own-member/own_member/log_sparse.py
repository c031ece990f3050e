"""LogSparse: each token attends to itself and to the tokens 1, 2, 4, 8, ... before it.

Each query has O(log T) keys, and log2(T) layers connect any token with all earlier tokens. Li et al. 2019,
section 4.2.
"""

import dataclasses
from typing import ClassVar

from torch import Tensor

from polyformer.attention.patterns import ByDistance
from polyformer.core.errors import InputError


@dataclasses.dataclass(frozen=True)
class LogSparse(ByDistance):
    """Keys at power-of-two distances up to `before`, and the last `near` tokens."""

    before: int = 4096
    near: int = 0

    paper: ClassVar[str] = "Li et al. 2019 (LogSparse), section 4.2"

    def __post_init__(self) -> None:
        if self.before < 1 or self.near < 0:
            raise InputError(f"LogSparse: expected before >= 1 and near >= 0, got {self.before}, {self.near}")

    def ends(self) -> tuple[int, int]:
        """Return the range of distances: 0 <= i - j <= before."""
        return self.before, 0

    def sees(self, distance: Tensor) -> Tensor:
        """Return whether i - j is 0, a power of two (a single bit), or at most `near`."""
        return (distance & (distance - 1) == 0) | (distance <= self.near)

    @classmethod
    def examples(cls) -> tuple["LogSparse", ...]:
        """Return patterns with and without local attention."""
        return cls(16), cls(16, near=3)
