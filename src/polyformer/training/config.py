"""How a training run goes: how long, on what, and what it leaves behind."""

from dataclasses import dataclass, field
from typing import Literal

from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.parallel.config import ParallelConfig


@dataclass(frozen=True, kw_only=True)
class EngineConfig(Config):
    """What computes, and how: none of these change the mathematics."""

    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: CUDA where there is one
    precision: Literal["no", "bf16", "fp16"] = "no"  # type of products inside; weights stay as they are
    compile: bool = False  # torch.compile the forward and backward passes
    recompute: bool = False  # keep no activations inside blocks, compute them again for the backward pass
    threads: int | None = (
        None  # of the CPU; null: one for a tiny model, else torch's choice; on resume as many as before
    )

    parallel: ParallelConfig = field(default_factory=ParallelConfig)  # how several processes share the work

    timeout: float | None = (
        None  # seconds that processes wait for one another; null: torch's, 10 or 30 minutes
    )

    def __post_init__(self) -> None:
        if self.timeout is not None and not self.timeout > 0:
            raise InputError(f"timeout: expected seconds above 0, or null for torch's, got {self.timeout}")
        if self.threads is not None:
            at_least(1, threads=self.threads)


@dataclass(frozen=True, kw_only=True)
class SavingConfig(Config):
    """Checkpoints and the weights a run ends with."""

    checkpoint_every: int = 500  # steps; the last step and every best evaluation are saved too
    keep: int = 2  # last checkpoints kept, besides the best one
    final: Literal["last", "best", "average"] = "last"  # the weights the model ends with
    background: bool = False  # write checkpoints while training goes on, from a copy in the CPU's memory
    average: int = 5  # last regular checkpoints that final="average" takes the mean of (they are kept for it)

    def __post_init__(self) -> None:
        at_least(1, checkpoint_every=self.checkpoint_every, keep=self.keep, average=self.average)

    @property
    def kept(self) -> int:
        """How many of the last checkpoints stay on the disk."""
        return max(self.keep, self.average) if self.final == "average" else self.keep


@dataclass(frozen=True, kw_only=True)
class ReportingConfig(Config):
    """What is measured and shown while training."""

    log_every: int = 20  # steps between rows of training metrics; reading them waits for the device
    evaluate_every: int = 500  # steps; the last step is evaluated too
    tensorboard: bool = False  # also as TensorBoard events in OUT/tensorboard
    curves: bool = False  # also a picture, OUT/curves.png, at the end
    report: bool = False  # also a page of the finished run, OUT/report.html; `polyformer train` writes it

    def __post_init__(self) -> None:
        at_least(1, log_every=self.log_every, evaluate_every=self.evaluate_every)


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Config):
    """One training run. A step is one update of the weights."""

    steps: int = 1000
    accumulate: int = 1  # batches per step and process, summed as if they were one
    clip: float | None = 1.0  # largest norm of the whole gradient; null does not clip
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
    """Checks that every named value is `least` or more."""
    for name, value in values.items():
        if value < least:
            raise InputError(f"{name}: expected {least} or more, got {value}")
