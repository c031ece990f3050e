"""The training loop: shared by all tasks, resumable at any step, the same on one process or several."""

import dataclasses
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polyformer.core.errors import InputError, unknown
from polyformer.core.files import remove_partials
from polyformer.core.ops.cpu import threads
from polyformer.core.ops.tuning import adopted
from polyformer.models.initialization import Draw
from polyformer.training.checkpoint import Checkpoints, Progress, check_progress
from polyformer.training.config import EngineConfig, TrainingConfig, flattened
from polyformer.training.engine import (
    Engine,
    Feed,
    RecurrentLoss,
    StepBatches,
    StepSums,
    choose_kernels,
    choose_threads,
    is_main,
    seed_step,
)
from polyformer.training.machine import raise_peer_failure, tensor_float32
from polyformer.training.metrics import (
    PER_SECOND,
    Display,
    MetricsLog,
    Trackers,
    check_reporting,
    open_display,
    plot_curves,
)
from polyformer.training.optimizers import OptimizerConfig, ScheduleConfig
from polyformer.training.restore import Kept, Ranking, final_weights, load_checkpoint
from polyformer.training.run_control import Interrupted, SignalRequests, Signals, sole_writer
from polyformer.training.task import CalibratedTask, Calibration, FinalMetricsTask, TrainingTask

NOTHING: Mapping[Path, nn.Module] = {}


@dataclass(frozen=True)
class Result:
    """The result of a run. The model contains the final weights, in evaluation mode."""

    step: int  # updates made
    metrics: dict[str, float]  # of the final weights
    final_metrics: dict[str, dict[str, float]]  # more of them, from `FinalMetricsTask`
    calibration: Calibration | None  # of the final weights, from `CalibratedTask`
    best: float | None  # best value of the task's metric during the run
    best_step: int | None
    kept: Kept  # the final weights, and why these
    stopped_early: bool  # by `patience`
    checkpoint: Path  # the last one


def train(
    model: nn.Module,
    task: TrainingTask,
    config: TrainingConfig,
    optimizer_config: OptimizerConfig,
    schedule_config: ScheduleConfig,
    out: str | Path,
    seed: int = 0,
    resume: bool = False,
    from_step: int | None = None,
) -> Result:
    """Train `model` on `task`; write checkpoints, metrics and curves to the folder `out`.

    With `resume` the run continues from the checkpoint of `from_step`, by default the last complete
    checkpoint in `out` (the start if there is none yet), and on the CPU its result equals an uninterrupted
    run bit for bit. Otherwise `out` must not contain a checkpoint. Each step and process seeds torch, numpy
    and random from `seed`.

    Under `accelerate launch` or `torchrun`, every process calls this with the same arguments. The loss of a
    step is the mean over the labelled tokens of all its batches on all processes. Raises `InputError` for an
    unavailable device or precision, a folder in which another process trains, a run that cannot be resumed, a
    full disk, and a loss that is not finite; the last checkpoint stays intact. Raises `Interrupted`, a
    `KeyboardInterrupt`, if a signal stopped the run (see `polyformer.training.run_control`).
    """
    with sole_writer(Path(out)) if is_main() else nullcontext():
        return Training(
            model, task, config, optimizer_config, schedule_config, Path(out), seed, resume, from_step
        ).run()


def open_engine(config: EngineConfig) -> Engine:
    """Return the engine of this process: for whole models, or for parts of a model in each process.

    Raises `InputError` for an unavailable device or precision, and for another number of processes.
    """
    if config.parallel.whole:
        return Engine(config)
    from polyformer.training.distributed.mesh_engine import open_mesh_engine

    return open_mesh_engine(config)


class Training:
    """A call of `train`. The constructor resumes or prepares a run, checks everything and writes nothing.

    `run` trains. The caller holds the lock of the folder.
    """

    def __init__(
        self,
        model: nn.Module,
        task: TrainingTask,
        config: TrainingConfig,
        optimizer: OptimizerConfig,
        schedule: ScheduleConfig,
        out: Path,
        seed: int,
        resume: bool,
        from_step: int | None,
        draw: Draw | None = None,
    ) -> None:
        self.task, self.config, self.schedule, self.out = task, config, schedule, out
        self.engine = open_engine(config.engine)
        self.notes = self.engine.place_model(model, task, draw)  # to show when the run begins
        self.model = model
        self.optimizer = self.engine.build(optimizer, model)
        self.rates: list[float] = [group["lr"] for group in self.optimizer.param_groups]
        self.display = Display()
        self.final_metrics: dict[str, dict[str, float]] = {}
        self.calibration: Calibration | None = None
        self.main = self.engine.rank == 0
        self.ranking = Ranking(task.best, task.direction)
        self._resume_or_start(seed, resume, from_step)

    def _resume_or_start(self, seed: int, resume: bool, from_step: int | None) -> None:
        check_reporting(self.config.reporting, self.out)
        check_activation_checkpointing(self.model, self.config.engine.recompute)
        saving = self.config.saving
        self.checkpoints = Checkpoints(self.out, saving.checkpoint_every, saving.kept)
        self.writer = self.engine.writer(self.checkpoints, saving.background)
        chosen = self.checkpoints.choose(from_step)
        if chosen is not None and not resume:
            raise InputError(
                f"out: {self.out} already holds a run (to {chosen.name}); resume it or name another folder"
            )
        self.progress, saved = Progress(seed=seed), None
        self.sums = StepSums(self.engine)
        if chosen is not None:
            saved = load_checkpoint(chosen, self.model, self.optimizer)
            self.progress = saved["progress"]
            if self.progress.scaler:
                self.engine.scaler.load_state_dict(self.progress.scaler)
            self.notes.append(f"resumed {self.out} at step {self.progress.step}")
        elif resume:
            self.notes.append(f"{self.out} has no checkpoint yet: it starts again at step 0")
        check_progress(self.out, self.progress, seed, self.config.steps)
        self.recurrent_loss = RecurrentLoss(self.model, self.task, self.engine, saved)
        self.threads, notes = choose_threads(self.engine, self.model, saved)
        self.choices, more = choose_kernels(self.engine, saved)
        self.notes += notes + more

    def run(self, files: Mapping[Path, nn.Module] = NOTHING) -> Result:
        """Run the remaining steps and finish. files: paths of the final weights of (sub)modules."""
        with (
            activation_checkpointing(self.model, self.config.engine.recompute),
            threads(self.threads),
            adopted(self.choices),
            tensor_float32(self.engine.precision, self.engine.device),
            raise_peer_failure(),
            open_display(self.config.steps, self.progress.step, self.main) as self.display,
        ):
            self._open()
            with Signals() as self.signals, self.writer:
                while self.progress.step < self.config.steps and not self.out_of_patience():
                    self.step(self.feed.next())
                    self.after_step()
            self.finish(files)
        if self.log is not None:
            self.log.close()
            if self.config.reporting.curves:
                plot_curves(self.out)
        return Result(
            step=self.progress.step,
            metrics=self.progress.metrics,
            final_metrics=self.final_metrics,
            calibration=self.calibration,
            best=self.progress.best_metrics.get(self.task.best),
            best_step=self.progress.best_step,
            kept=self.kept,
            stopped_early=self.progress.step < self.config.steps,
            checkpoint=self.checkpoints.path(self.progress.step),
        )

    def _open(self) -> None:
        self.log: MetricsLog | None = None
        if self.main:
            remove_partials(self.out)
            self.checkpoints.remove_after(self.progress.step)
            self.checkpoints.prune(self.progress.best_step)
            after, names = self.progress.step, self.config.reporting.tracking
            settings = flattened(self.config.to_dict())
            trackers = Trackers(self.out, names, after, settings) if names else None
            self.log = MetricsLog(self.out, after, trackers)
        for note in self.notes:
            self.display.note(note)
        self.engine.wrap(self.model)
        self.feed = Feed(
            self.task, self.engine, self.config.accumulate, self.progress.epoch, self.progress.used
        )
        self.first = self.progress.step
        self.earlier_seconds = self.log.seconds if self.log else 0.0
        self.model.train()
        self.began = self.row_began = time.perf_counter()

    def step(self, group: StepBatches) -> None:
        """Run one update of the weights."""
        progress, engine = self.progress, self.engine
        progress.step, progress.epoch, progress.used = progress.step + 1, self.feed.epoch, self.feed.used
        seed_step(progress.seed, progress.step, engine.seed_rank, engine.device)
        factor = self.schedule.factor(progress.step, self.config.steps)
        for settings, rate in zip(self.optimizer.param_groups, self.rates):
            settings["lr"] = rate * factor
        loss = engine.run_passes(self.recurrent_loss.loss, group)
        self.sums.add(progress.step, group, loss, engine.update(self.optimizer, self.config.clip))

    def after_step(self) -> None:
        """Log metrics, evaluate, save and handle signals, as far as they are due after a step."""
        step, reporting = self.progress.step, self.config.reporting
        last = step == self.config.steps
        due = step % reporting.log_every == 0 or last
        row: dict[str, float] = self.training_row() if due else {}
        if step == self.first + 1 and not due:
            seconds = time.perf_counter() - self.began
            first = f"first step: loss {self.sums.mean():.4f}, {seconds:.1f} s"  # the loss of this process
            self.display.note(f"{first}; metrics every {reporting.log_every} steps")
        with self.paused():
            improved = False
            if step % reporting.evaluate_every == 0 or last:
                improved = self.evaluate()
                row |= {f"valid_{name}": value for name, value in self.progress.metrics.items()}
            if row and self.log is not None:
                self.log.write(step, row)
                self.display.report(step, row, self.seconds_left())
            # Processes must agree when to stop; they communicate signals where they exchange metrics anyway.
            asked = self.collect_requests() if due or self.engine.world == 1 else SignalRequests()
            regular = step % self.config.saving.checkpoint_every == 0
            if regular or improved or last or self.out_of_patience() or asked.save or asked.stop:
                self.save()
            if asked.save:
                self.writer.wait()
                self.display.note(f"step {step}: checkpoint written, as a signal asked")
            if asked.stop:
                raise Interrupted(asked.stop, step)

    def collect_requests(self) -> SignalRequests:
        """Return the requests of signals in all processes. Raises the error of a failed checkpoint."""
        mine = dataclasses.replace(self.signals.take(), failed=self.writer.failed)
        asked = self.engine.merge_requests(mine)
        if asked.failed:
            self.writer.raise_failure()
        return asked

    def collect(self) -> float:
        """Add the last losses to the progress; return tokens read. Raises for a loss that is not finite."""
        loss, weight, tokens, bad = self.sums.collect()
        if bad <= self.progress.step:
            kept = self.checkpoints.latest()
            raise InputError(
                f"training: the loss or its gradient is not a finite number at step {bad:.0f}; "
                f"{f'{kept} is intact' if kept else 'there is no checkpoint yet'}; lower the learning rate, "
                "lengthen the warm-up or clip the gradient"
            )
        self.progress.loss_sum += loss
        self.progress.weight_sum += weight
        return tokens

    def training_row(self) -> dict[str, float]:
        """Return the training metrics since the last row."""
        tokens = self.collect()
        now = time.perf_counter()
        row = {
            "epoch": self.progress.epoch,
            "loss": self.progress.loss_sum / max(self.progress.weight_sum, 1.0),
            "lr": self.optimizer.param_groups[0]["lr"],
            "grad_norm": float(self.sums.norm),
            f"{getattr(self.task, 'unit', 'tokens')}{PER_SECOND}": tokens / (now - self.row_began),
            "seconds": self.earlier_seconds + now - self.began,
        }
        self.progress.loss_sum = self.progress.weight_sum = 0.0
        self.sums.tokens, self.row_began = 0, now
        return row

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time inside the context from the training speed."""
        start = time.perf_counter()
        yield
        self.row_began += time.perf_counter() - start

    def seconds_left(self) -> float:
        """Estimate the remaining seconds from the speed so far, including evaluations and checkpoints."""
        pace = (time.perf_counter() - self.began) / (self.progress.step - self.first)
        return pace * (self.config.steps - self.progress.step)

    def measure(self) -> dict[str, float]:
        """Return the task's metrics of the current weights."""
        self.model.eval()
        with torch.no_grad(), self.engine.forward_context(), self.engine.evaluating(self.model) as model:
            metrics = self.task.evaluate(model, self.engine.evaluation_group)
        self.model.train()
        # All processes must agree on the best value to the last bit, or they would diverge.
        return self.engine.broadcast({name: float(value) for name, value in metrics.items()})

    def evaluate(self) -> bool:
        """Evaluate the model; return whether the result is the best so far."""
        progress = self.progress
        progress.metrics = self.measure()
        if not progress.metrics:
            if self.config.patience is not None or self.config.saving.final == "best":
                raise InputError(
                    "patience and final 'best' need an evaluation, but the task has no data for one"
                )
            return False
        if self.task.best not in progress.metrics:
            raise unknown("metric to choose the best by", self.task.best, progress.metrics)
        improved = self.ranking.is_better(progress.metrics, progress.best_metrics)
        progress.compare(improved)
        return improved

    def out_of_patience(self) -> bool:
        """Return whether `patience` evaluations in a row brought no new best."""
        return self.config.patience is not None and self.progress.stale >= self.config.patience

    def save(self) -> None:
        """Check that the weights are finite, and write a checkpoint or start to write it."""
        tokens = self.collect()  # collective: called by all processes
        self.sums.tokens = int(tokens) if self.main else 0
        recurrent_state = self.recurrent_loss.gather_state()
        self.progress.scaler = self.engine.scaler.state_dict()
        if self.log is not None:
            self.log.sync()
        if self.main or not self.engine.whole:
            content = self.progress, self.model, self.optimizer, recurrent_state
            self.writer.write(self.engine.snapshot(*content))

    def calibrate(self) -> None:
        """Calibrate the probabilities of the final weights, if the task has labels and held-out data."""
        if not isinstance(self.task, CalibratedTask):
            return
        self.model.eval()
        with torch.no_grad(), self.engine.evaluating(self.model) as model:
            fitted = self.task.calibrate(model, self.engine.evaluation_group)
        # All processes must divide by the same number to the last bit, or their shards would not match.
        self.calibration = self.engine.broadcast(fitted)
        if self.calibration is None:
            return
        self.display.note(self.calibration.note())
        if self.calibration.changes:
            # Outside of the evaluation, which works on gathered copies of divided weights.
            self.task.divide_logits(self.model, self.calibration.temperature)
            self.progress.metrics = self.measure()

    def finish(self, files: Mapping[Path, nn.Module]) -> None:
        """Load the final weights into the model, and write them to files."""
        self.engine.accelerator.wait_for_everyone()
        self.kept = final_weights(
            self.config.saving, self.checkpoints, self.progress, self.model, self.measure, self.ranking
        )
        self.progress.metrics = self.kept.metrics
        self.display.note(self.kept.reason)
        self.calibrate()
        self.model.eval()
        if isinstance(self.task, FinalMetricsTask):
            with torch.no_grad(), self.engine.evaluating(self.model) as model:
                self.final_metrics = self.task.evaluate_final(model, self.engine.evaluation_group)
        self.engine.finish(files)
        self.model.eval()  # a sharded model that was made plain is back in training mode


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
