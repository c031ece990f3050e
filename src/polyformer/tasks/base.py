"""What every task has: batches from rows of data, sums over batches, and metrics from the sums.

A task says how rows become batches (`training_batches`, `held_out`), which model it needs (`adapt`), what it
sums over the batches of held-out data (`totals`) and which metrics follow from the sums (`metrics`).
`Fitting` joins a task with its data and is what the training loop runs.
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
from polyformer.core.state import State
from polyformer.data import Batches, DataConfig, Splits, Stream, Tokenizer, TokenizerConfig
from polyformer.data.batching import Batch
from polyformer.data.mixing import Mixture, OneAfterAnother
from polyformer.data.numbered import Numbered
from polyformer.data.prepared.in_order import MappedSegments
from polyformer.data.prepared.rows import MappedBatches
from polyformer.data.segments import Segments
from polyformer.data.windows import Windows
from polyformer.model import Transformer
from polyformer.tasks.workers import ALONE, Workers
from polyformer.training.config import at_least

Rows = Iterable[Any]
"""Rows of data: dicts of the columns in `needs`, as `polyformer.data.load` gives them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskConfig(Config):
    """Family of tasks. `needs`: the columns a row of data must have; `tokenized`: whether the model reads the
    tokens of a tokenizer."""

    needs: ClassVar[tuple[str, ...]] = ()
    tokenized: ClassVar[bool] = False

    batch_tokens: int = 4096  # tokens in a batch, padding included; of pairs on the longer side

    def __post_init__(self) -> None:
        at_least(1, batch_tokens=self.batch_tokens)

    @property
    def own_data(self) -> Splits | None:
        """What stands in place of data that are read, where the task makes its own."""
        return None

    @property
    def own_sources(self) -> dict[str, tuple[DataConfig, tuple[str, ...]]]:
        """What `own_data` are read from, where they are: sources by name, and the columns that are read."""
        return {}

    def situated(self, path: str | None) -> Self:
        """This configuration with what the source `path` of the training rows tells besides them."""
        return self

    def resolve(self, rows: Rows) -> Self:
        """This configuration with what only the training rows can tell (the names of labels) filled in."""
        return self

    def tokenizer(self, config: TokenizerConfig, rows: Rows) -> Tokenizer:
        """The tokenizer that `config` describes, trained on `rows` if it must be; only if `tokenized`."""
        raise NotImplementedError(f"the task {self.kind} reads no tokens")

    def build(self, tokenizer: Any) -> "Task":
        """The task; `tokenizer` is None unless it is `tokenized`."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Held-out data: batches in a fixed order, and what was counted in their text (see `TextTask.count`)."""

    batches: Batches | Windows | Segments | Numbered | OneAfterAnother
    counts: dict[str, float]


class Task(abc.ABC):
    """One way to train a model; see the module's docstring for its methods."""

    best: ClassVar[str] = "loss"
    """The metric by which checkpoints are compared; `direction` says whether less or more of it is better."""
    direction: ClassVar[Literal["min", "max"]] = "min"
    sums: int
    """How many numbers `totals` gives."""

    def __init__(self, config: TaskConfig):
        self.batch_tokens = config.batch_tokens
        self.notes: list[str] = []  # what the user should know about the data that were prepared

    @property
    def continues(self) -> bool:
        """Whether a batch goes on, row by row, with the texts of the batch before."""
        return False

    @property
    def spreads(self) -> bool:
        """Whether the loss of a model is all that training reads of it, so that processes may share texts."""
        kind = type(self)
        return kind.loss is Task.loss and kind.training_module is Task.training_module

    @property
    def finishes(self) -> bool:
        """Whether `finish` measures anything."""
        return type(self).finish is not Task.finish

    @abc.abstractmethod
    def adapt(self, config: Any) -> Any:
        """`config`, a model's, with the sizes and the head of this task; `InputError` if it does not fit."""

    @abc.abstractmethod
    def training_batches(
        self, rows: Any, seed: int
    ) -> Batches | Stream | Windows | Segments | Numbered | Mixture | MappedBatches | MappedSegments:
        """Batches of `rows` to train on, in an order drawn from `seed`."""

    @abc.abstractmethod
    def held_out(self, rows: Rows) -> HeldOut:
        """`rows` made ready to measure on."""

    @abc.abstractmethod
    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        """Numbers (float64 [sums]) of which `metrics` reads the sums over all batches."""

    @abc.abstractmethod
    def metrics(self, totals: list[float], counts: dict[str, float]) -> dict[str, float]:
        """The metrics of held-out data from the sums of `totals` and the counts of its text."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The training loss: a mean over `weight(batch)` labels."""
        return model(**batch).loss

    def loss_after(self, model: nn.Module, batch: Batch, state: State | None) -> tuple[Tensor, State | None]:
        """As `loss`, after the state that the batch before left; and the state that this one leaves."""
        output = model(**batch, state=state, use_cache=True)
        return output.loss, output.state.detach()

    def weight(self, batch: Batch) -> int:
        """The number of labels over which the loss of `batch` is a mean."""
        return int((batch["labels"] != IGNORED).sum())

    def training_module(self, model: Transformer, run: Path | None = None) -> nn.Module:
        """What is trained and measured: `model`, or a module of it and an auxiliary model.

        An auxiliary model is new, or read from the folder `run` of a finished run.
        """
        return model

    def auxiliary_models(self, module: nn.Module) -> dict[str, Transformer]:
        """What `training_module` put beside the model, by the name of its folder in that of the run."""
        return {}

    @torch.no_grad()
    def measure(self, model: nn.Module, held: HeldOut, workers: Workers = ALONE) -> dict[str, float]:
        """Metrics of `model` (in evaluation mode) on held-out data, the same in every process."""
        device = next(model.parameters()).device

        def totals(batch: Batch) -> Tensor:
            return self.totals(model, {name: tensor.to(device) for name, tensor in batch.items()})

        batches = (batch for _, batch in held.batches.epoch(0))
        zero = torch.zeros(self.sums, dtype=torch.float64, device=device)
        return self.metrics(workers.total(totals, batches, zero), held.counts)

    def measure_rows(self, model: nn.Module, rows: Rows, workers: Workers = ALONE) -> dict[str, float]:
        """Metrics of a finished model on `rows`, the same in every process."""
        return self.measure(model, self.held_out(rows), workers)

    def finish(self, model: nn.Module, rows: Rows, workers: Workers = ALONE) -> dict[str, float]:
        """Metrics for which a finished model writes, too slow for training; none for most tasks."""
        return {}

    def score(self, model: nn.Module, rows: Rows, workers: Workers = ALONE) -> dict[str, float]:
        """All metrics of a finished model on `rows`, the same in every process."""
        return {**self.measure_rows(model, rows, workers), **self.finish(model, rows, workers)}
