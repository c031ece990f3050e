"""Configuration of a training run: its length, the engine, and the outputs."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from polyformer.core.config import Config
from polyformer.core.ranges import PositiveFloat, PositiveInt, Wording
from polyformer.training.distributed.config import ParallelConfig


@dataclass(frozen=True, kw_only=True)
class EngineConfig(Config):
    """The devices and how they compute: these options do not change the mathematics."""

    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: CUDA where there is one
    precision: Literal["no", "bf16", "fp16"] = "no"  # autocast type of matrix products; weights keep theirs
    compile: bool = False  # torch.compile the forward and backward passes
    recompute: bool = False  # activation checkpointing of blocks: recompute in the backward pass
    threads: PositiveInt | None = None  # on the CPU; null: 1 for a tiny model, else torch's; kept on resume

    parallel: ParallelConfig = field(default_factory=ParallelConfig)  # distribution over processes

    timeout: PositiveFloat | None = None  # seconds that processes wait for each other; null: torch's default


@dataclass(frozen=True, kw_only=True)
class SavingConfig(Config):
    """Checkpoints, and the weights at the end of a run."""

    checkpoint_every: PositiveInt = 500  # steps; the last step and every best evaluation are saved too
    keep: PositiveInt = 2  # number of last checkpoints to keep, in addition to the best
    final: Literal["last", "best", "average"] = "last"  # the weights at the end of the run
    background: bool = False  # write checkpoints during training, from a copy in CPU memory
    average: PositiveInt = 5  # number of last regular checkpoints that final="average" averages (and keeps)

    @property
    def kept(self) -> int:
        """Return the number of last checkpoints that stay on the disk."""
        return max(self.keep, self.average) if self.final == "average" else self.keep


@dataclass(frozen=True, kw_only=True)
class ReportingConfig(Config):
    """Metrics and reports during training."""

    log_every: PositiveInt = 20  # steps between rows of training metrics; a row synchronizes with the device
    evaluate_every: PositiveInt = 500  # steps; the last step is evaluated too
    tensorboard: bool = False  # also as TensorBoard events in OUT/tensorboard
    curves: bool = False  # also a plot, OUT/curves.png, at the end
    report: bool = False  # also a page of the finished run, OUT/report.html; `polyformer train` writes it


Clip = Annotated[PositiveFloat, Wording(fix="null for no clipping")]


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Config):
    """A training run. A step is a single update of the weights."""

    steps: PositiveInt = 1000
    accumulate: PositiveInt = 1  # gradient accumulation: batches per step and process
    clip: Clip | None = 1.0  # maximum norm of the whole gradient; null does not clip
    patience: PositiveInt | None = None  # evaluations without a new best before stopping; null: no limit
    engine: EngineConfig = field(default_factory=EngineConfig)
    saving: SavingConfig = field(default_factory=SavingConfig)
    reporting: ReportingConfig = field(default_factory=ReportingConfig)

    def __post_init__(self) -> None:
        self.engine.parallel.check_accumulated(self.accumulate)
