"""One contender of `bench attention` on one shape."""

import dataclasses
from collections.abc import Callable

from torch import Tensor

from polyformer.bench.member import Member

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q, k, v [B, H, T, D] -> [B, H, T, D]."""

DENSE = "sdpa", "unfused"
"""Peers that look at every key whatever the member: one line each."""


class AbsentError(Exception):
    """A contender that cannot take part here, and why."""


@dataclasses.dataclass(frozen=True)
class BenchmarkCase:
    """`peer` is a name of `contenders.PEERS`, or None for ours; `text` says the member, see `Member`."""

    text: str
    peer: str | None
    length: int
    batch: int
    heads: int
    width: int
    backward: bool
    device: str
    dtype: str
    causal: bool = False

    @property
    def label(self) -> str:
        """What tables and plots call it."""
        if self.peer is None:
            return self.text
        return self.peer if self.peer in DENSE else f"{self.peer} {self.text}"

    @property
    def member(self) -> Member:
        """The member at this length."""
        return Member.read(self.text, self.length)

    def no_counterpart(self, why: str = "") -> AbsentError:
        """What a peer says that has no such member."""
        return AbsentError(f"it has no counterpart of {self.text}{f': {why}' if why else ''}")
