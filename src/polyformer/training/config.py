"""Configuration of a training run: its length, the engine, and the outputs."""

from dataclasses import dataclass, field
from typing import Literal

from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.training.distributed.config import ParallelConfig


@dataclass(frozen=True, kw_only=True)
class EngineConfig(Config):
    """The devices and how they compute: these options do not change the mathematics."""

    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: CUDA where there is one
    precision: Literal["no", "bf16", "fp16"] = "no"  # autocast type of matrix products; weights keep theirs
    compile: bool = False  # torch.compile the forward and backward passes
    recompute: bool = False  # activation checkpointing of blocks: recompute in the backward pass
    threads: int | None = (
        None  # on the CPU; null: 1 for a tiny model, else torch's default; unchanged on resume
    )

    parallel: ParallelConfig = field(default_factory=ParallelConfig)  # distribution over processes

    timeout: float | None = (
        None  # seconds that processes wait for each other; null: torch's default, 10 or 30 minutes
    )

    def __post_init__(self) -> None:
        if self.timeout is not None and not self.timeout > 0:
            raise InputError(f"timeout: expected seconds above 0, or null for torch's, got {self.timeout}")
        if self.threads is not None:
            at_least(1, threads=self.threads)


@dataclass(frozen=True, kw_only=True)
class SavingConfig(Config):
    """Checkpoints, and the weights at the end of a run."""

    checkpoint_every: int = 500  # steps; the last step and every best evaluation are saved too
    keep: int = 2  # number of last checkpoints to keep, in addition to the best
    final: Literal["last", "best", "average"] = "last"  # the weights at the end of the run
    background: bool = False  # write checkpoints during training, from a copy in CPU memory
    average: int = 5  # number of last regular checkpoints that final="average" averages (and keeps)

    def __post_init__(self) -> None:
        at_least(1, checkpoint_every=self.checkpoint_every, keep=self.keep, average=self.average)

    @property
    def kept(self) -> int:
        """Return the number of last checkpoints that stay on the disk."""
        return max(self.keep, self.average) if self.final == "average" else self.keep


@dataclass(frozen=True, kw_only=True)
class ReportingConfig(Config):
    """Metrics and reports during training."""

    log_every: int = 20  # steps between rows of training metrics; each row synchronizes with the device
    evaluate_every: int = 500  # steps; the last step is evaluated too
    tensorboard: bool = False  # also as TensorBoard events in OUT/tensorboard
    curves: bool = False  # also a plot, OUT/curves.png, at the end
    report: bool = False  # also a page of the finished run, OUT/report.html; `polyformer train` writes it

    def __post_init__(self) -> None:
        at_least(1, log_every=self.log_every, evaluate_every=self.evaluate_every)


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Config):
    """A training run. A step is a single update of the weights."""

    steps: int = 1000
    accumulate: int = 1  # gradient accumulation: batches per step and process
    clip: float | None = 1.0  # maximum norm of the whole gradient; null does not clip
    patience: int | None = (
        None  # evaluations in a row without a new best before stopping; null never stops early
    )
    engine: EngineConfig = field(default_factory=EngineConfig)
    saving: SavingConfig = field(default_factory=SavingConfig)
    reporting: ReportingConfig = field(default_factory=ReportingConfig)

    def __post_init__(self) -> None:
        at_least(1, steps=self.steps, accumulate=self.accumulate)
        self.engine.parallel.check_accumulated(self.accumulate)
        if self.patience is not None:
            at_least(1, patience=self.patience)
        if self.clip is not None and not self.clip > 0:
            raise InputError(f"clip: expected a number above 0, or null for no clipping, got {self.clip}")


def at_least(least: int, **values: int) -> None:
    """Raise `InputError` unless every named value is `least` or more."""
    for name, value in values.items():
        if value < least:
            raise InputError(f"{name}: expected {least} or more, got {value}")
