"""Along which dimensions the processes of a run divide its work, and how many along each."""

import math
from dataclasses import dataclass
from typing import Literal

from polyformer.core.config import Config
from polyformer.core.errors import InputError

DIMENSIONS = ("pipeline", "data", "shard", "context", "tensor")
"""From the outside in: neighbours in the last exchange most, and are best on one machine."""

PipelineSchedule = Literal["1f1b", "gpipe"]
"""See `polyformer.parallel.pipeline`."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Config):
    """How many processes share each part of a training; the product is the number of all processes."""

    data: int | None = None  # whole copies of the model, each with its own batches; null: the rest of them
    shard: int = 1  # with own batches too, and each with a part of the weights and of the optimizer's memory
    tensor: int = 1  # share every batch, each with some of the heads and of the feed-forward
    context: int = 1  # share every text, each with some of its tokens, and a part of the weights as in shard
    pipeline: int = 1  # share every batch, each with some of the layers; microbatches are those accumulated
    stages: int = 1  # of the pipeline in each of its processes: above 1, wait less and exchange more
    pipeline_schedule: PipelineSchedule = "1f1b"  # gpipe: all forward passes first

    def __post_init__(self) -> None:
        for name in DIMENSIONS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name}: expected 1 process or more, got {value}")
        if self.stages < 1 or (self.stages > 1 and (self.pipeline == 1 or self.pipeline_schedule != "1f1b")):
            raise InputError(
                f"stages: expected 1, or more in a pipeline with the schedule '1f1b', got {self.stages}"
            )
        if self.pipeline > 1 and self.context > 1:
            raise InputError(
                f"pipeline: not together with context yet, got pipeline {self.pipeline} x context "
                f"{self.context}; use it with data, shard and tensor"
            )

    def check_accumulated(self, batches: int) -> None:
        """Raises `InputError` where a pipeline cannot run so many microbatches."""
        if self.pipeline > 1:
            check_microbatches(batches, self.pipeline, self.pipeline_schedule, self.stages)

    def check_optimizer(self, kind: str) -> None:
        """Raises `InputError` for an optimizer that does not update a divided model."""
        if kind == "adafactor" and not self.whole:
            raise InputError(
                "optimizer: 'adafactor' keeps rows and columns of whole matrices, which torch does not "
                "divide over processes; use 'adamw' or 'muon', or leave shard and tensor at 1"
            )

    @property
    def whole(self) -> bool:
        """Whether every process has the whole model and whole batches: plain data parallelism, or alone."""
        return all(getattr(self, name) == 1 for name in DIMENSIONS if name != "data")

    def sizes(self, world: int) -> dict[str, int]:
        """How many of `world` processes stand along each of `DIMENSIONS`.

        Raises `InputError` where they cannot: every process of a run comes to the same answer alone.
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


def check_microbatches(number: int, processes: int, schedule: PipelineSchedule, stages: int) -> None:
    """Raises `InputError` where `processes` of so many `stages` each cannot run `number` microbatches."""
    rounds = max(1, number // processes)
    if stages == 1 and schedule == "1f1b" and number < processes:
        raise InputError(
            f"accumulate: the schedule '1f1b' needs as many microbatches as stages, {processes}, got "
            f"{number}; raise accumulate, or use 'gpipe'"
        )
    if stages > 1 and number % rounds:
        raise InputError(
            f"accumulate: {processes} processes of {stages} stages run microbatches in {rounds} equal "
            f"rounds, got {number}; use a multiple of {processes}"
        )
