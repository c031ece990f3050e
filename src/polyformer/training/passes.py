"""What surrounds the passes of a step: batches, settings, seeds, states of recurrent models, and sums."""

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from polyformer.core.errors import InputError
from polyformer.core.ops import tuning as store
from polyformer.core.ops.cpu import suitable_threads
from polyformer.core.state import State
from polyformer.training.engine import Engine
from polyformer.training.machine import PROCESSOR, THREADS, differences, machine, versions
from polyformer.training.task import Batch, RecurrentTask, StepBatches, TrainingTask, share_rows


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


def choose_threads(engine: Engine, model: nn.Module, saved: dict[str, Any] | None) -> tuple[int, list[str]]:
    """Return the number of threads to train `model` with, and notes for the user; `saved`: the resumed state.

    By default a resumed run uses the number of threads of its start: a sum split differently rounds
    differently.
    """
    own = engine.config.threads or suitable_threads(model)
    if saved is None:
        return own, []
    before = saved["machine"].get(THREADS, own)
    number = engine.config.threads or before
    notes = [f"{number} threads, as the run began; --training.engine.threads N for others"]
    now = {**machine(engine.device, engine.world), THREADS: number, **versions()}
    changed = differences({**saved["machine"], **saved["versions"]}, now)
    if changed:
        return number, [f"{'; '.join(changed)}: the last bits may differ from an uninterrupted run's"]
    return number, notes if number != own and engine.device.type == "cpu" else []


def choose_kernels(engine: Engine, saved: dict[str, Any] | None) -> tuple[dict[str, Any], list[str]]:
    """Return the tuning choices of the run with the state `saved`, and notes for the user.

    On another machine the choices are not reused: the results would differ in the last bits anyway.
    """
    if saved is None:
        return {}, []
    before, now = saved.get("tuning", {}), machine(engine.device, engine.world)
    if any(saved["machine"].get(name) != now[name] for name in PROCESSOR):
        return {}, []
    pinned = store.pinned()
    if pinned is not None and any(pinned.get(name) != choice for name, choice in before.items()):
        return before, [f"{store.PIN} is set: the last bits may differ from an uninterrupted run's"]
    return before, []


def check_activation_checkpointing(model: nn.Module, wanted: bool) -> None:
    """Raise `InputError` if recomputation is `wanted` but no submodule of `model` supports it."""
    if wanted and not _switches(model):
        raise InputError(
            f"recompute: no part of {type(model).__name__} has an attribute 'recompute', so it cannot "
            "compute its activations again; set recompute to false"
        )


@contextmanager
def activation_checkpointing(model: nn.Module, wanted: bool) -> Iterator[None]:
    """Set `recompute` on every submodule of `model` that has the switch, and restore it at the end.

    If it is not `wanted`, a switch stays as it is.
    """
    if not wanted:
        yield
        return
    parts = _switches(model)
    before = [part.recompute for part in parts]
    for part in parts:
        part.recompute = True
    try:
        yield
    finally:
        for part, value in zip(parts, before):
            part.recompute = value


def _switches(model: nn.Module) -> list[Any]:
    return [part for part in model.modules() if hasattr(part, "recompute")]


def seed_step(seed: int, step: int, rank: int, device: torch.device) -> None:
    """Seed torch (on the CPU and `device`), numpy and random from the position in the run.

    The random states are therefore a function of (seed, step, rank): they need not be saved, and random
    numbers drawn in an evaluation do not change the training after it.
    """
    digest = hashlib.blake2b(f"{seed}/{step}/{rank}".encode(), digest_size=8).digest()
    number = int.from_bytes(digest) >> 1
    # torch.manual_seed also seeds every other device type, which takes half a millisecond per step.
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed(number)
    numpy.random.seed(number % 2**32)
    random.seed(number)


class RecurrentLoss:
    """The loss of each batch, given the state after the previous batches if model and task support it.

    state: of the rows of this process, detached; None before the first batch, and if no state is carried.
    `saved`: a checkpoint. Its state covers all rows, so that a run can resume on any number of processes.
    """

    def __init__(self, model: nn.Module, task: TrainingTask, engine: Engine, saved: dict[str, Any] | None):
        recurrent = getattr(model, "supports_recurrence", False) and getattr(task, "continues", False)
        self.task: RecurrentTask = task  # type: ignore[assignment]
        self.loss: Callable[[nn.Module, Batch], Tensor] = self.loss_after if recurrent else task.loss
        """The mean loss over the labelled tokens of a batch."""
        self.engine = engine
        if getattr(task, "continues", False):
            # Raises if the rows cannot be shared.
            next(task.batches(0, 0, engine.data_rank, engine.data_world), None)
        state: State | None = (saved or {}).get("recurrent_state")
        self.state = None if state is None else state.map(self._local_rows)

    def loss_after(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of `batch` after the previous batches, and keep the state after it."""
        loss, self.state = self.task.loss_after(model, batch, self.state)
        return loss

    def gather_state(self) -> State | None:
        """Return the state of all rows, for a checkpoint. Collective: every process calls it."""
        return None if self.state is None else self.state.map(self.engine.gather)

    def _local_rows(self, rows: Tensor) -> Tensor:
        return share_rows(rows, self.engine.data_rank, self.engine.data_world).to(self.engine.device)


class StepSums:
    """The sums over the steps of this process since the last `collect`; `norm` is the last gradient norm.

    They stay on the device, which is read only once per row of metrics.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens = 0  # read since the last row of metrics
        self.weight = 0  # labelled tokens
        self.loss = self._number(0.0)  # times labelled tokens
        self.norm = self._number(0.0)
        self.bad = self._number(float("inf"))  # first step with a loss or gradient that is not finite

    def _number(self, value: float) -> torch.Tensor:
        return torch.tensor(value, dtype=torch.float64, device=self.engine.device)

    def add(self, step: int, group: StepBatches, loss: torch.Tensor, norm: torch.Tensor) -> None:
        """Add a step on `group`: the sum of its loss over labelled tokens, and the norm of its gradient."""
        self.loss += loss
        self.weight += sum(group.weights)
        self.tokens += group.tokens
        self.norm = norm
        # Loss scaling of fp16 skips updates after a gradient overflow, so only the loss is checked.
        telltale = self.loss if self.engine.scaler.is_enabled() else self.loss + norm
        self.bad = torch.where(telltale.isfinite(), self.bad, self.bad.clamp(max=step))

    def mean(self) -> float:
        """Return the mean loss of this process."""
        return float(self.loss) / max(self.weight, 1)

    def collect(self) -> tuple[float, float, float, float]:
        """Return loss, labelled tokens and tokens of all processes, and the first step that was not finite.

        Resets the sums except the tokens. Collective: all processes call it.
        """
        mine = torch.stack([self.loss, self._number(self.weight), self._number(self.tokens), self.bad])
        losses, weights, tokens, bad = zip(*self.engine.rows(mine))
        self.loss.zero_()
        self.weight = 0
        return sum(losses), sum(weights), sum(tokens), min(bad)
