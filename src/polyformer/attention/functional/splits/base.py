"""Base of the three ways to split a call."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from polyformer.attention.functional.request import Request

Result = tuple[Tensor, Tensor | None]
"""Output [B, H, Tq, Dv] and log-sum-exp [B, H, Tq], None if it was not requested."""


@dataclasses.dataclass(frozen=True, eq=False)
class Split(abc.ABC):
    """A call as several smaller calls `requests`; `join` joins their results."""

    requests: tuple[Request, ...] = dataclasses.field(repr=False)

    name: ClassVar[str]
    needs_lse: ClassVar[bool] = False

    @abc.abstractmethod
    def join(self, outs: Sequence[Tensor], lses: Sequence[Tensor | None]) -> Result:
        """Return the result of the whole call from the results of `requests`, in their order."""

    @abc.abstractmethod
    def label(self, indices: Sequence[int]) -> str:
        """Return a readable description of the requests with these indices."""
