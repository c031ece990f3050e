"""The processes that share an evaluation: each does a share of the batches, or of the texts."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Self

from torch import Tensor

from polyformer.tasks.keeping import Results
from polyformer.training import share
from polyformer.training.task import Evaluators


@dataclasses.dataclass(frozen=True)
class Workers:
    """One process by default: `add` sums a tensor over them, `gather` puts their lists one after another, and
    in every process. What lies in `results` is not computed again."""

    rank: int = 0
    world: int = 1
    add: Callable[[Tensor], Tensor] = lambda total: total
    gather: Callable[[list[Any]], list[Any]] = lambda values: values
    results: Results | None = None

    @classmethod
    def of(cls, accelerator: Evaluators) -> Self:
        """The processes of `accelerator`."""
        if accelerator.num_processes == 1:
            return cls()
        from accelerate.utils import gather_object

        add = partial(accelerator.reduce, reduction="sum")
        return cls(accelerator.process_index, accelerator.num_processes, add, gather_object)  # type: ignore[arg-type]

    def total(self, function: Callable[[Any], Tensor], batches: Iterable[Any], zero: Tensor) -> list[float]:
        """`zero` and the sum of `function(batch)` over all batches, by every process for its share."""
        known = function if self.results is None else partial(self.results.tensor, function)
        for batch in share(batches, 0, self.rank, self.world):
            zero = zero + known(batch).to(zero.device)
        return self.add(zero).tolist()

    def each(self, function: Callable[[list[Any]], Sequence[Any]], items: Sequence[Any]) -> list[Any]:
        """`function(items)`, a result for each item in order; every process does a share and gets all."""
        own = range(self.rank, len(items), self.world)
        known = function if self.results is None else partial(self.results.each, function)
        values = known([items[number] for number in own]) if own else []
        return [value for _, value in sorted(self.gather([*zip(own, values)]), key=lambda pair: pair[0])]


ALONE = Workers()
"""One process."""
