"""Execution of the passes of a step on whole models, and what surrounds them. Built on `accelerate`.

The engine has the device, processes, precision and compilation. It is for a single process, or for several
with a whole model each; the engines of models that are divided among processes are in
`polyformer.training.distributed.mesh_engine`. Around its passes are the batches, settings, seeds, states of
recurrent models, and sums of a step.
"""

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy
import torch
from torch import Tensor, nn

from polyformer.core.errors import InputError
from polyformer.core.files import write_tensors
from polyformer.core.host_values import batch_to_device, drop_full_mask
from polyformer.core.ops import tuning as store
from polyformer.core.ops.compiled_code import prepare_inductor
from polyformer.core.ops.cpu import suitable_threads
from polyformer.core.state import State
from polyformer.models.initialization import Draw
from polyformer.nn.stack import Stack
from polyformer.training.checkpoint import Checkpoints, CheckpointWriter, Progress, Snapshot, open_writer
from polyformer.training.config import EngineConfig
from polyformer.training.machine import (
    PROCESSOR,
    THREADS,
    autocast,
    choose_device,
    choose_precision,
    differences,
    machine,
    open_accelerator,
    rank,
    versions,
    world,
)
from polyformer.training.optimizers import OptimizerConfig
from polyformer.training.run_control import SignalRequests
from polyformer.training.task import (
    Batch,
    EvaluationGroup,
    RecurrentTask,
    StepBatches,
    TrainingTask,
    share_rows,
)


def is_main() -> bool:
    """Return whether this process is the first or only process of its run; available before the engine."""
    return rank() == 0


class Engine:
    """A process of a run with a whole model, started directly or by `accelerate launch` or `torchrun`.

    Mixed precision uses torch's autocast around the loss instead of the option of accelerate, which would
    patch the caller's model and convert its outputs (all logits) back to float32.
    """

    whole: ClassVar[bool] = True
    """Whether every process has the whole model."""

    def __init__(self, config: EngineConfig) -> None:
        device, self.config = choose_device(config.device), config
        config.parallel.sizes(world())  # before the processes wait for each other
        self.accelerator = open_accelerator(device.type, config.timeout)
        self.device = self.accelerator.device
        self.precision = choose_precision(config.precision, self.device)
        self.rank = self.accelerator.process_index
        self.world = self.accelerator.num_processes
        self.data_rank, self.data_world = self.rank, self.world
        """The place of this process among the processes, or groups of them, that read separate batches."""
        self.seed_rank = self.rank
        """The rank for random seeds. Processes that compute the same values draw the same numbers."""
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.precision == "fp16")
        self.wrapped: nn.Module = nn.Identity()

    @property
    def evaluation_group(self) -> EvaluationGroup:
        """Return the processes that share an evaluation, as tasks expect them."""
        return self.accelerator  # type: ignore[return-value]

    def place_model(self, model: nn.Module, task: TrainingTask, draw: Draw | None = None) -> list[str]:
        """Move the weights, or the shard of this process, to the device; changes `model` until `finish`.

        draw: see `deferred_initialization`. Returns notes for the user. Raises `InputError` if `task` does
        not support the configured parallelism.
        """
        if self.config.precision == "auto" and getattr(task, "needs_float32", False):
            self.precision = "no"
        model.to(self.device)
        return []

    def build(self, config: OptimizerConfig, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of `model`, after `place_model`."""
        return config.build(model)

    def wrap(self, model: nn.Module) -> None:
        """Wrap `model` (on `device`) for training; the names and attributes of `model` do not change."""
        wrapped = model
        if self.world > 1:
            stacks = (module for module in model.modules() if isinstance(module, Stack))
            if any(stack.skips_layers for stack in stacks):  # each process skips different layers
                self.accelerator.ddp_handler.find_unused_parameters = True  # type: ignore[union-attr]
            wrapped = self.accelerator.prepare_model(model)
        self.wrapped = wrapped
        if self.config.compile:
            prepare_inductor()
            self.wrapped = torch.compile(wrapped)  # type: ignore[assignment]
            # Compiled code cannot read a mask, so this hook of the compiled module runs outside of it.
            self.wrapped.register_forward_pre_hook(drop_full_mask, with_kwargs=True)

    def forward_context(self) -> AbstractContextManager[object]:
        """Return the context of a forward pass of training, in the configured precision."""
        return autocast(self.precision, self.device)

    def evaluating(self, model: nn.Module) -> AbstractContextManager[nn.Module]:
        """Return a context for an evaluation of `model`; it gives the module that tasks evaluate."""
        return nullcontext(model)

    def pass_context(self, last: bool) -> AbstractContextManager[object]:
        """Return the context of a pass, which synchronizes gradients only in the last pass of a step."""
        # A compiled module forwards attributes, so `no_sync` of the data-parallel module is used either way.
        return nullcontext() if last or self.world == 1 else self.accelerator.no_sync(self.wrapped)

    def passes(self, own: int, accumulate: int) -> int:
        """Return the number of passes that this process must run in a step, at most `accumulate`.

        own: batches that this process has. Full replicas of the model communicate only in the last pass.
        """
        return own

    def run_passes(self, loss_of: Callable[[nn.Module, Batch], Tensor], group: StepBatches) -> Tensor:
        """Compute the gradients of the mean loss over the labelled tokens of the step.

        loss_of: the mean loss of a module and a batch. Returns the sum of the losses of this process's
        tokens, a float64 scalar on the device.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for i, (batch, weight) in enumerate(zip(group.batches, group.weights)):
            with self.pass_context(last=i + 1 == len(group.batches)):
                with self.forward_context():
                    loss = loss_of(self.wrapped, batch_to_device(batch, self.device))
                # Data parallelism averages gradients over ranks; the factor `data_world` makes it a sum.
                self.scaler.scale(loss * (weight * self.data_world / group.total)).backward()
            total += loss.detach().double() * weight
        return total

    def update(self, optimizer: torch.optim.Optimizer, clip: float | None) -> Tensor:
        """Clip the gradients, update the weights and reset the gradients; return the norm before clipping."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.scaler.unscale_(optimizer)
        norm = self.gradient_norm(parameters)
        if clip is not None:
            self.clip_gradients(parameters, clip, norm)
        self.scaler.step(optimizer)
        self.scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return norm

    def gradient_norm(self, parameters: list[nn.Parameter]) -> Tensor:
        """Return the norm of the whole gradient."""
        return torch.nn.utils.get_total_norm(p.grad for p in parameters if p.grad is not None)

    def clip_gradients(self, parameters: list[nn.Parameter], most: float, norm: Tensor) -> None:
        """Scale the gradients with norm `norm` to a norm of at most `most`."""
        torch.nn.utils.clip_grads_with_norm_(parameters, most, norm)

    def sum(self, values: list[float]) -> Tensor:
        """Return the sums of `values` over the processes, in float64 on the device."""
        mine = torch.tensor(values, dtype=torch.float64, device=self.device)
        return self.gather(mine[None]).sum(0)  # counts processes that share batches once

    def rows(self, values: Tensor) -> list[list[float]]:
        """Return `values` [n] of every data-parallel rank, one row per rank. Waits for the device."""
        return self.gather(values[None]).tolist()

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the rows [B, ...] of all data-parallel ranks, concatenated; each has the same number."""
        return tensor if self.world == 1 else self.accelerator.gather(tensor)  # type: ignore[return-value]

    def broadcast(self, value: Any) -> Any:
        """Return the `value` of the first process."""
        if self.world == 1:
            return value
        from accelerate.utils import broadcast_object_list

        return broadcast_object_list([value])[0]

    def merge_requests(self, asked: SignalRequests) -> SignalRequests:
        """Return the union of the requests of all processes."""
        if self.world == 1:
            return asked
        mine = torch.tensor([asked.stop, asked.save, asked.failed], dtype=torch.float64, device=self.device)
        stops, saves, failures = zip(*self.accelerator.gather(mine[None]).tolist())  # type: ignore[union-attr]
        return SignalRequests(int(max(stops)), bool(max(saves)), bool(max(failures)))

    def writer(self, checkpoints: Checkpoints, background: bool) -> CheckpointWriter:
        """Return the checkpoint writer: the first process writes, of a divided model all processes."""
        return open_writer(checkpoints, background)

    def snapshot(
        self,
        progress: Progress,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        recurrent_state: State | None,
    ) -> Snapshot:
        """Return the content of a checkpoint, or the shard of this process."""
        return Snapshot.of(progress, model, optimizer, machine(self.device, self.world), recurrent_state)

    def finish(self, files: Mapping[Path, nn.Module]) -> None:
        """Write the weights of models to files, tied weights once.

        files: the model given to `place_model`, or submodules of it, by path. A sharded model is plain
        afterwards: complete in the first process, without data in the others.
        """
        for path, module in files.items() if self.rank == 0 else ():
            write_tensors(path, dict(module.state_dict()))


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
