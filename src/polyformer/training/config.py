"""Configuration of a training run: its length, the engine and its parallelism, and the outputs."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.ranges import PositiveFloat, PositiveInt, Wording

DIMENSIONS = ("pipeline", "data", "shard", "context", "tensor")
"""From outermost to innermost: neighbours in the last communicate most, and should share a machine."""

PipelineSchedule = Literal["1f1b", "gpipe"]
"""See `polyformer.training.distributed.pipeline`."""

TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]
"""Names of `tracking`."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Config):
    """The number of processes along each dimension of parallelism; their product is the world size."""

    data: PositiveInt | None = None  # replicas, each with its own batches; null: all remaining processes
    shard: PositiveInt = 1  # also with own batches, and each with a shard of the weights and optimizer state
    tensor: PositiveInt = 1  # share every batch, each with some of the heads and feed-forward units
    context: PositiveInt = 1  # share every text, each with some of its tokens; weights sharded as in shard
    pipeline: PositiveInt = 1  # share every batch, each with some layers; accumulated are microbatches
    stages: PositiveInt = 1  # pipeline stages per process: above 1, less idle time and more communication
    pipeline_schedule: PipelineSchedule = "1f1b"  # gpipe: all forward passes first

    def __post_init__(self) -> None:
        if self.stages > 1 and (self.pipeline == 1 or self.pipeline_schedule != "1f1b"):
            raise InputError(
                f"stages: expected 1, or more in a pipeline with the schedule '1f1b', got {self.stages}"
            )
        if self.pipeline > 1 and self.context > 1:
            raise InputError(
                f"pipeline: not together with context yet, got pipeline {self.pipeline} x context "
                f"{self.context}; use it with data, shard and tensor"
            )

    def check_accumulated(self, batches: int) -> None:
        """Raise `InputError` if a pipeline cannot run this number of microbatches."""
        if self.pipeline == 1:
            return
        if self.stages == 1 and self.pipeline_schedule == "1f1b" and batches < self.pipeline:
            raise InputError(
                f"accumulate: the schedule '1f1b' needs as many microbatches as stages, {self.pipeline}, got "
                f"{batches}; raise accumulate, or use 'gpipe'"
            )
        rounds = max(1, batches // self.pipeline)
        if self.stages > 1 and batches % rounds:
            raise InputError(
                f"accumulate: {self.pipeline} processes of {self.stages} stages run microbatches in {rounds} "
                f"equal rounds, got {batches}; use a multiple of {self.pipeline}"
            )

    def check_optimizer(self, kind: str) -> None:
        """Raise `InputError` for an optimizer that cannot update a sharded model."""
        if kind == "adafactor" and not self.whole:
            raise InputError(
                "optimizer: 'adafactor' keeps rows and columns of whole matrices, which torch does not "
                "divide over processes; use 'adamw' or 'muon', or leave shard and tensor at 1"
            )

    @property
    def whole(self) -> bool:
        """Return whether every process has the whole model: data parallel, or a single process."""
        return self.shard == self.tensor == self.context == self.pipeline == 1

    def sizes(self, world: int) -> dict[str, int]:
        """Return the number of processes along each of `DIMENSIONS` for `world` processes.

        Raises `InputError` if they do not fit: every process of a run computes this independently.
        """
        others = {name: getattr(self, name) for name in DIMENSIONS if name != "data"}
        product = math.prod(others.values())
        factors = " x ".join(f"{name} {size}" for name, size in others.items() if size > 1) or "1"
        if self.data is None and world % product:
            raise InputError(
                f"parallel: {factors} needs a multiple of {product} processes, got {world}; "
                "launch as many, or make the product a divisor of their number"
            )
        data = world // product if self.data is None else self.data
        if data * product != world:
            raise InputError(
                f"parallel: data {data} x {factors} is {data * product} processes, got {world}; launch "
                f"{data * product} (torchrun --nproc-per-node), or leave data out: it is then the rest"
            )
        return {name: data if name == "data" else others[name] for name in DIMENSIONS}


@dataclass(frozen=True, kw_only=True)
class EngineConfig(Config):
    """The devices and how they compute: these options do not change the mathematics."""

    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: CUDA where there is one
    # Autocast type of matrix products; weights keep theirs. auto: bf16 on CUDA where supported, else no;
    # reinforcement learning is in float32 by default.
    precision: Literal["auto", "no", "bf16", "fp16"] = "auto"
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
    # The weights at the end of the run: the last, the best of all evaluations, or an average if it is better.
    final: Literal["last", "best", "average"] = "last"
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
    tracking: tuple[TrackerName, ...] = ()  # services that get the metrics too
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


def flattened(options: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Convert {a: {b: 1}} to {"a.b": 1}; a mapping with a `kind` is a complete part and is not flattened."""
    flat: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, dict) and "kind" not in value:
            flat |= flattened(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
