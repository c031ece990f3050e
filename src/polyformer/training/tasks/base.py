"""The interface of tasks: batches from rows of data, sums over batches, and metrics from the sums.

A task defines the batches of rows (`training_batches`, `held_out`), the required model (`adapt`), the sums
over batches of held-out data (`totals`) and the metrics computed from the sums (`metrics`). `TaskWithData`
combines a task with its data for the training loop.
"""

import abc
import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from polyformer.core.config import Config
from polyformer.core.labels import IGNORED
from polyformer.core.ranges import PositiveInt
from polyformer.core.state import State
from polyformer.data import Batches, DataConfig, Splits, Stream, Tokenizer, TokenizerConfig
from polyformer.data.batching import Batch
from polyformer.data.episode_windows import EpisodeWindows
from polyformer.data.mixing import Concatenation, Mixture
from polyformer.data.numbered_batches import NumberedBatches
from polyformer.data.prepared.in_order import MappedSegments
from polyformer.data.prepared.rows import MappedBatches
from polyformer.data.segments import Segments
from polyformer.models.architectures import Transformer
from polyformer.training.tasks.workers import SINGLE_PROCESS, Workers

Rows = Iterable[Any]
"""Rows of data: dicts of the columns in `needs`, as returned by `polyformer.data.load`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskConfig(Config):
    """Base of the tasks.

    `needs`: the required columns of the data; `tokenized`: whether the model reads tokens of a tokenizer.
    """

    option: ClassVar[str] = "task.kind"
    needs: ClassVar[tuple[str, ...]] = ()
    tokenized: ClassVar[bool] = False

    batch_tokens: PositiveInt = 4096  # tokens per batch, including padding; for pairs, on the longer side

    @property
    def own_data(self) -> Splits | None:
        """Return the data that the task generates instead of reading them, or None."""
        return None

    @property
    def own_sources(self) -> dict[str, tuple[DataConfig, tuple[str, ...]]]:
        """Return the sources of `own_data`, if any, by name, with the columns that are read."""
        return {}

    def with_source_defaults(self, path: str | None) -> Self:
        """Return this configuration with options that depend on the source `path` of the training data."""
        return self

    def resolve(self, rows: Rows) -> Self:
        """Return this with options that depend on the training rows, such as the names of labels."""
        return self

    def tokenizer(self, config: TokenizerConfig, rows: Rows) -> Tokenizer:
        """Return the tokenizer of `config`, trained on `rows` if needed; only if `tokenized`."""
        raise NotImplementedError(f"the task {self.kind} reads no tokens")

    def build(self, tokenizer: Any) -> "Task":
        """Return the task; `tokenizer` is None unless it is `tokenized`."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Held-out data: batches in a fixed order, and counts of their text (see `TextTask.count`)."""

    batches: Batches | EpisodeWindows | Segments | NumberedBatches | Concatenation
    counts: dict[str, float]


class Task(abc.ABC):
    """A training task; see the docstring of the module for its methods."""

    best: ClassVar[str] = "loss"
    """The metric that compares checkpoints; `direction` is "min" or "max"."""
    direction: ClassVar[Literal["min", "max"]] = "min"
    sums: int
    """The number of elements of `totals`."""

    def __init__(self, config: TaskConfig):
        self.batch_tokens = config.batch_tokens
        self.notes: list[str] = []  # notes for the user about the prepared data

    @property
    def continues(self) -> bool:
        """Return whether a batch continues the texts of the previous batch, row by row."""
        return False

    @property
    def supports_context_parallel(self) -> bool:
        """Return whether training uses only the loss of a model, so that processes may share texts."""
        kind = type(self)
        return kind.loss is Task.loss and kind.training_module is Task.training_module

    @property
    def finishes(self) -> bool:
        """Return whether `finish` has metrics."""
        return type(self).finish is not Task.finish

    @abc.abstractmethod
    def adapt(self, config: Any) -> Any:
        """Return `config` with the sizes and the head of this task; `InputError` if it does not fit."""

    @abc.abstractmethod
    def training_batches(
        self, rows: Any, seed: int
    ) -> (
        Batches
        | Stream
        | EpisodeWindows
        | Segments
        | NumberedBatches
        | Mixture
        | MappedBatches
        | MappedSegments
    ):
        """Return batches of `rows` for training, in a random order from `seed`."""

    @abc.abstractmethod
    def held_out(self, rows: Rows) -> HeldOut:
        """Return `rows` prepared for evaluation."""

    @abc.abstractmethod
    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return numbers (float64 [sums]); `metrics` gets their sums over all batches."""

    @abc.abstractmethod
    def metrics(self, totals: list[float], counts: dict[str, float]) -> dict[str, float]:
        """Return the metrics of held-out data from the sums of `totals` and the counts of its text."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the training loss: a mean over `weight(batch)` labels."""
        return model(**batch).loss

    def loss_after(self, model: nn.Module, batch: Batch, state: State | None) -> tuple[Tensor, State | None]:
        """Return `loss` given the state after the previous batch, and the state after this batch."""
        output = model(**batch, state=state, use_cache=True)
        return output.loss, output.state.detach()

    def weight(self, batch: Batch) -> int:
        """Return the number of labels in the mean of the loss of `batch`."""
        return int((batch["labels"] != IGNORED).sum())

    def training_module(self, model: Transformer, run: Path | None = None) -> nn.Module:
        """Return the module that is trained and measured: `model`, or a module of it and an auxiliary model.

        An auxiliary model is new, or read from the folder `run` of a finished run.
        """
        return model

    def auxiliary_models(self, module: nn.Module) -> dict[str, Transformer]:
        """Return the auxiliary models in `module`, by the name of their folder in the folder of the run."""
        return {}

    @torch.no_grad()
    def measure(self, model: nn.Module, held: HeldOut, workers: Workers = SINGLE_PROCESS) -> dict[str, float]:
        """Return metrics of `model` (in evaluation mode) on held-out data, the same in every process."""
        device = next(model.parameters()).device

        def totals(batch: Batch) -> Tensor:
            return self.totals(model, {name: tensor.to(device) for name, tensor in batch.items()})

        batches = (batch for _, batch in held.batches.epoch(0))
        zero = torch.zeros(self.sums, dtype=torch.float64, device=device)
        return self.metrics(workers.total(totals, batches, zero), held.counts)

    def measure_rows(
        self, model: nn.Module, rows: Rows, workers: Workers = SINGLE_PROCESS
    ) -> dict[str, float]:
        """Return metrics of a finished model on `rows`, the same in every process."""
        return self.measure(model, self.held_out(rows), workers)

    def finish(self, model: nn.Module, rows: Rows, workers: Workers = SINGLE_PROCESS) -> dict[str, float]:
        """Return metrics of generated text, too slow during training; empty for most tasks."""
        return {}

    def score(self, model: nn.Module, rows: Rows, workers: Workers = SINGLE_PROCESS) -> dict[str, float]:
        """Return all metrics of a finished model on `rows`, the same in every process."""
        return {**self.measure_rows(model, rows, workers), **self.finish(model, rows, workers)}
