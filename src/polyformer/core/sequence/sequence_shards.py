"""The slots of a long sequence that each process of a context-parallel group holds.

`contiguous`: process p of P holds the p-th part. `balanced`: of 2 P parts process p holds p and 2 P - 1 - p,
so that with causal attention all processes compute equally many pairs of query and key.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor

Run = tuple[int, int]
"""Slots start <= i < stop."""


def contiguous(length: int, processes: int) -> tuple[tuple[Run, ...], ...]:
    """Return the runs of every process: one part each, with lengths that differ by at most 1."""
    return tuple((part,) for part in _parts(length, processes))


def balanced(length: int, processes: int) -> tuple[tuple[Run, ...], ...]:
    """Return the runs of every process: an early and a late part each.

    Brandon et al. 2023 (Striped Attention) balance by single tokens; the report of Llama 3, section 3.3.2, by
    two chunks, as here.
    """
    parts = _parts(length, 2 * processes)
    return tuple((parts[p], parts[2 * processes - 1 - p]) for p in range(processes))


def _parts(length: int, count: int) -> list[Run]:
    return [(i * length // count, (i + 1) * length // count) for i in range(count)]


@dataclasses.dataclass(frozen=True, eq=False)
class SequenceShard:
    """The slots of one process among the processes of its group.

    group: the torch process group over which the sequence is sharded. rank: this process in the group. runs:
    the runs of every process, in increasing order, which is the order of its tokens. strategy: how keys reach
    the processes that hold the queries that need them: "needed", "ring", "all" or "auto"
    (`attention/functional/context_parallel/`).
    source: the runs of another sequence that the queries attend to, for every process; None for
    self-attention.
    """

    group: Any
    rank: int
    runs: tuple[tuple[Run, ...], ...]
    strategy: str = "auto"
    source: tuple[tuple[Run, ...], ...] | None = None

    @property
    def key_runs(self) -> tuple[tuple[Run, ...], ...]:
        """The runs of keys that every process holds."""
        return self.runs if self.source is None else self.source

    @property
    def key_shard(self) -> "SequenceShard":
        """The shard of the keys: of the source, or this shard."""
        return (
            self if self.source is None else SequenceShard(self.group, self.rank, self.source, self.strategy)
        )

    def with_source(self, source: "SequenceShard") -> "SequenceShard":
        """Return a shard of this process's queries and of the keys that it holds of `source`."""
        return dataclasses.replace(self, source=source.runs)

    @property
    def local_runs(self) -> tuple[Run, ...]:
        """The runs of this process."""
        return self.runs[self.rank]

    @property
    def length(self) -> int:
        """The number of slots that this process holds."""
        return sum(stop - start for start, stop in self.local_runs)

    def slots(self, device: torch.device) -> Tensor:
        """Return the slot of each token that this process holds, [T]."""
        return torch.cat([torch.arange(start, stop, device=device) for start, stop in self.local_runs])

    def take(self, x: Tensor, dim: int = -1) -> Tensor:
        """Return the part of x, which has all slots along `dim`, that belongs to this process."""
        return torch.cat([x.narrow(dim, start, stop - start) for start, stop in self.local_runs], dim)
