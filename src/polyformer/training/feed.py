"""The batches of each step, in an order fixed by the step number, for any number of processes."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch

from polyformer.core.errors import InputError
from polyformer.training.engine import Engine
from polyformer.training.task import Batch, TrainingTask


@dataclass(frozen=True)
class StepBatches:
    """The batches that a process computes in one step."""

    batches: list[Batch]  # at least one
    weights: list[int]  # labelled tokens per batch
    total: float | torch.Tensor  # labelled tokens of the step, over all processes
    tokens: int  # tokens read by this process


class Feed:
    """An iterator over groups of `accumulate` batches per process and step.

    A step never mixes epochs: the last step of an epoch may be smaller. Therefore the set of batches of a
    step is the same for every split of `accumulate * world` into the two factors. If batches continue each
    other's texts, each process takes its rows of all `accumulate` batches, for any number of processes.
    """

    def __init__(self, task: TrainingTask, engine: Engine, accumulate: int, epoch: int, used: int) -> None:
        self.task, self.engine, self.accumulate = task, engine, accumulate
        self.continues = getattr(task, "continues", False)
        self.epoch = epoch
        self.used = used  # batches of the epoch that all processes have taken in total
        self._stream = self._open()

    def _open(self) -> Iterator[Batch]:
        return self.task.batches(self.epoch, self.used, self.engine.data_rank, self.engine.data_world)

    def next(self) -> StepBatches:
        """Return the batches of the next step; start the next epoch when the current epoch is finished.

        Raises `InputError` for an empty data set.
        """
        group = self._take()
        if group is None and self.used:
            self.epoch, self.used = self.epoch + 1, 0
            self._stream = self._open()
            group = self._take()
        if group is None:
            raise InputError(f"data: there is no training batch in epoch {self.epoch}; the data set is empty")
        self.used += self.accumulate * (1 if self.continues else self.engine.data_world)
        return group

    def _take(self) -> StepBatches | None:
        """Return the next group, or None if no process has a batch left. Collective."""
        batches = list(islice(self._stream, self.accumulate))
        weights = [self.task.weight(batch) for batch in batches]
        total, anyone = self._total(sum(weights), bool(batches))
        if not anyone:
            return None
        tokens = sum(_tokens(batch, weight) for batch, weight in zip(batches, weights))
        # A mean over no labels is NaN, so a batch without labels is skipped instead of multiplied by zero,
        # unless the next batch continues its texts.
        useful = [(batch, weight) for batch, weight in zip(batches, weights) if weight or self.continues]
        missing = self.engine.passes(len(useful), self.accumulate) - len(useful)
        if missing or not useful:
            useful += [(self._filler(), 0)] * max(missing, 1)
        return StepBatches([batch for batch, _ in useful], [weight for _, weight in useful], total, tokens)

    def _total(self, weight: int, mine: bool) -> tuple[float | torch.Tensor, bool]:
        if self.engine.world == 1:
            return max(float(weight), 1.0), mine
        total, counted = self.engine.sum([weight, mine])
        # Reading `counted` waits for the device; a process with a batch does not need it.
        return total.clamp(min=1.0), mine or bool(counted)

    def _filler(self) -> Batch:
        """Return a batch to run with weight 0: every process must take part in the collectives of a pass."""
        for batch in self.task.batches(self.epoch, 0, 0, 1):
            if self.task.weight(batch):
                return batch
        raise InputError(
            f"data: no batch of epoch {self.epoch} has a labelled token, so there is nothing to learn"
        )


def _tokens(batch: Batch, weight: int) -> int:
    """Return the number of input tokens without padding, or the labels if a batch has no tokens."""
    if "attention_mask" in batch:
        return int(batch["attention_mask"].sum())
    return batch["input_ids"].numel() if "input_ids" in batch else weight
