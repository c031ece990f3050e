"""The batches of each step, in an order that a step number fixes, however many processes share them."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch

from polyformer.core.errors import InputError
from polyformer.training.engine import Engine
from polyformer.training.task import Batch, Task


@dataclass(frozen=True)
class Group:
    """What one process computes in one step."""

    batches: list[Batch]  # at least one
    weights: list[int]  # labelled tokens of each
    total: float | torch.Tensor  # labelled tokens of the step, over all processes
    tokens: int  # tokens read by this process


class Feed:
    """Takes `accumulate` batches per process for each step.

    A step never mixes epochs: what is left at the end of one makes a smaller step. So the step's batches,
    as a set, are the same for every split of `accumulate * world` into the two. Where batches go on with one
    another, each process takes its rows of all `accumulate`, for any number of processes.
    """

    def __init__(self, task: Task, engine: Engine, accumulate: int, epoch: int, used: int) -> None:
        self.task, self.engine, self.accumulate = task, engine, accumulate
        self.continues = getattr(task, "continues", False)
        self.epoch = epoch
        self.used = used  # batches of the epoch that all processes together have taken
        self._stream = self._open()

    def _open(self) -> Iterator[Batch]:
        return self.task.batches(self.epoch, self.used, self.engine.data_rank, self.engine.data_world)

    def next(self) -> Group:
        """The batches of the next step; begins the next epoch where this one is used up."""
        group = self._take()
        if group is None and self.used:
            self.epoch, self.used = self.epoch + 1, 0
            self._stream = self._open()
            group = self._take()
        if group is None:
            raise InputError(f"data: there is no training batch in epoch {self.epoch}; the data set is empty")
        self.used += self.accumulate * (1 if self.continues else self.engine.data_world)
        return group

    def _take(self) -> Group | None:
        """The next group, or None where no process has a batch left. Every process calls it alike."""
        batches = list(islice(self._stream, self.accumulate))
        weights = [self.task.weight(batch) for batch in batches]
        total, anyone = self._total(sum(weights), bool(batches))
        if not anyone:
            return None
        tokens = sum(_tokens(batch, weight) for batch, weight in zip(batches, weights))
        # A mean over no labels is no number, so a batch without any is left out, not multiplied by zero;
        # but not where the next one goes on with it.
        useful = [(batch, weight) for batch, weight in zip(batches, weights) if weight or self.continues]
        missing = self.engine.passes(len(useful), self.accumulate) - len(useful)
        if missing or not useful:
            useful += [(self._filler(), 0)] * max(missing, 1)
        return Group([batch for batch, _ in useful], [weight for _, weight in useful], total, tokens)

    def _total(self, weight: int, mine: bool) -> tuple[float | torch.Tensor, bool]:
        if self.engine.world == 1:
            return max(float(weight), 1.0), mine
        total, counted = self.engine.sum([weight, mine])
        # Reading `counted` waits for the device; who has a batch knows the answer without.
        return total.clamp(min=1.0), mine or bool(counted)

    def _filler(self) -> Batch:
        """A batch to pass with weight 0: every process must take part in what they exchange."""
        for batch in self.task.batches(self.epoch, 0, 0, 1):
            if self.task.weight(batch):
                return batch
        raise InputError(
            f"data: no batch of epoch {self.epoch} has a labelled token, so there is nothing to learn"
        )


def _tokens(batch: Batch, weight: int) -> int:
    """Input tokens that are not padding; the labels where a batch has no tokens."""
    if "attention_mask" in batch:
        return int(batch["attention_mask"].sum())
    return batch["input_ids"].numel() if "input_ids" in batch else weight
