"""What the three ways to split a call have in common."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from polyformer.dot_product.request import Request

Result = tuple[Tensor, Tensor | None]
"""Output [B, H, Tq, Dv] and log-sum-exp [B, H, Tq], None where nobody asked for it."""


@dataclasses.dataclass(frozen=True, eq=False)
class Split(abc.ABC):
    """One call as several smaller calls `requests`, whose results `join` puts together."""

    requests: tuple[Request, ...] = dataclasses.field(repr=False)

    name: ClassVar[str]
    needs_lse: ClassVar[bool] = False

    @abc.abstractmethod
    def join(self, outs: Sequence[Tensor], lses: Sequence[Tensor | None]) -> Result:
        """The result of the whole call from those of `requests`, in their order."""

    @abc.abstractmethod
    def label(self, indices: Sequence[int]) -> str:
        """What the requests of these indices are, for people."""
