"""Which slots of a long sequence each process of a group holds, where one process does not hold all.

`contiguous`: process p of P holds the p-th part. `balanced`: of 2 P parts process p holds p and 2 P - 1 - p,
so that where queries see the past alone, all processes have as many pairs of query and key to compute.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor

Run = tuple[int, int]
"""Slots start <= i < stop."""


def contiguous(length: int, processes: int) -> tuple[tuple[Run, ...], ...]:
    """The runs of every process: one part each, of lengths that differ by 1 at most."""
    return tuple((part,) for part in _parts(length, processes))


def balanced(length: int, processes: int) -> tuple[tuple[Run, ...], ...]:
    """The runs of every process: two parts each, an early and a late one (Brandon et al. 2023 (Striped
    Attention) balance by single tokens; Llama 3's report, section 3.3.2, by two chunks, as here)."""
    parts = _parts(length, 2 * processes)
    return tuple((parts[p], parts[2 * processes - 1 - p]) for p in range(processes))


def _parts(length: int, count: int) -> list[Run]:
    return [(i * length // count, (i + 1) * length // count) for i in range(count)]


@dataclasses.dataclass(frozen=True, eq=False)
class Share:
    """The slots of one process among those of its group.

    group: the torch process group over which the sequence is spread. rank: this process in it. runs: those of
    every process, in rising order, which is the order of its tokens. way: how keys get to the processes whose
    queries need them: "needed", "ring", "all" or "auto" (`dot_product/spread/`). source: the runs of another
    sequence that is read, of every process; None where the sequence reads itself.
    """

    group: Any
    rank: int
    runs: tuple[tuple[Run, ...], ...]
    way: str = "auto"
    source: tuple[tuple[Run, ...], ...] | None = None

    @property
    def key_runs(self) -> tuple[tuple[Run, ...], ...]:
        """The runs of keys that every process holds."""
        return self.runs if self.source is None else self.source

    @property
    def keys(self) -> "Share":
        """The share of what is read: of the source, or itself."""
        return self if self.source is None else Share(self.group, self.rank, self.source, self.way)

    def reading(self, source: "Share") -> "Share":
        """This process's queries, and the keys that it holds of another sequence."""
        return dataclasses.replace(self, source=source.runs)

    @property
    def own(self) -> tuple[Run, ...]:
        """The runs of this process."""
        return self.runs[self.rank]

    @property
    def length(self) -> int:
        """How many slots this process holds."""
        return sum(stop - start for start, stop in self.own)

    def slots(self, device: torch.device) -> Tensor:
        """The slot of each token that this process holds, [T]."""
        return torch.cat([torch.arange(start, stop, device=device) for start, stop in self.own])

    def take(self, x: Tensor, dim: int = -1) -> Tensor:
        """What of x, which has all slots along `dim`, belongs to this process."""
        return torch.cat([x.narrow(dim, start, stop - start) for start, stop in self.own], dim)
