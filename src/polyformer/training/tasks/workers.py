"""The processes that share an evaluation: each processes a share of the batches, or of the texts."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Self

from torch import Tensor

from polyformer.training import share
from polyformer.training.task import EvaluationGroup
from polyformer.training.tasks.cached_results import CachedResults


@dataclasses.dataclass(frozen=True)
class Workers:
    """The processes of an evaluation, by default a single process.

    `add` sums a tensor over them, `gather` concatenates their lists, in every process. Cached `results` are
    not computed again.
    """

    rank: int = 0
    world: int = 1
    add: Callable[[Tensor], Tensor] = lambda total: total
    gather: Callable[[list[Any]], list[Any]] = lambda values: values
    results: CachedResults | None = None

    @classmethod
    def of(cls, accelerator: EvaluationGroup) -> Self:
        """Return the processes of `accelerator`."""
        if accelerator.num_processes == 1:
            return cls()
        from accelerate.utils import gather_object

        add = partial(accelerator.reduce, reduction="sum")
        return cls(accelerator.process_index, accelerator.num_processes, add, gather_object)  # type: ignore[arg-type]

    def total(self, function: Callable[[Any], Tensor], batches: Iterable[Any], zero: Tensor) -> list[float]:
        """Return `zero` plus the sum of `function(batch)` over all batches, computed in shares."""
        known = function if self.results is None else partial(self.results.tensor, function)
        for batch in share(batches, 0, self.rank, self.world):
            zero = zero + known(batch).to(zero.device)
        return self.add(zero).tolist()

    def each(self, function: Callable[[list[Any]], Sequence[Any]], items: Sequence[Any]) -> list[Any]:
        """Return `function(items)`, a result per item in order, in every process, computed in shares."""
        own = range(self.rank, len(items), self.world)
        known = function if self.results is None else partial(self.results.each, function)
        values = known([items[number] for number in own]) if own else []
        return [value for _, value in sorted(self.gather([*zip(own, values)]), key=lambda pair: pair[0])]


SINGLE_PROCESS = Workers()
"""A single process."""
