"""Tasks and their parts.

    part           asks                                            class
    rows           how is a row prepared, and how are batches?     `TaskRows`
    architecture   which model does the task need?                 `Architecture`
    objective      what is the loss, and over how many labels?     `ModelLoss`, or a subclass
    metrics        which sums over batches, and which metrics?     `Metrics`

A task is a declaration of its parts, in the `__init__` of a subclass of `Task`:

    class Reversal(Task, config=ReversalConfig):
        def __init__(self, config, tokenizer):
            super().__init__(
                config,
                tokenizer,
                rows=ReversedTexts(config, tokenizer),
                architecture=TextArchitecture("decoder", LanguageModelConfig(), tokenizer, config.row_length),
                metrics=Perplexity(),
            )

`TaskWithData` combines a task with its data for the training loop.
"""

import abc
import dataclasses
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, Self

import torch
from torch import Tensor, nn

from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.host_values import IGNORED, batch_to_device
from polyformer.core.ranges import PositiveInt
from polyformer.core.state import State
from polyformer.data import Batches, DataConfig, Splits, Stream, Tokenizer, TokenizerConfig
from polyformer.data.episodes import EpisodeWindows
from polyformer.data.prepared.rows import MappedBatches, MappedSegments
from polyformer.data.rows import Batch, Concatenation, Mixture, NumberedBatches
from polyformer.data.rows.packing import Segments
from polyformer.models.architectures import Transformer
from polyformer.training import share, share_rows
from polyformer.training.task import SINGLE_PROCESS, Calibration, EvaluationGroup, Workers, calibrated

Rows = Iterable[Any]
"""Rows of data: dicts of the columns in `needs`, as returned by `polyformer.data.sources.splits.load`."""

HeldOutBatches = Batches | EpisodeWindows | Segments | NumberedBatches | Concatenation
TrainingBatches = (
    Batches | Stream | EpisodeWindows | Segments | NumberedBatches | Mixture | MappedBatches | MappedSegments
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskConfig(Config):
    """Base of the tasks.

    `needs`: the required columns of the data; `tokenized`: whether the model reads tokens of a tokenizer;
    `task`: the class that `build` calls, which names this configuration as `class MyTask(Task, config=...)`.
    """

    option: ClassVar[str] = "task.kind"
    needs: ClassVar[tuple[str, ...]] = ()
    tokenized: ClassVar[bool] = False
    task: ClassVar[type["Task"]]

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

    def build(self, tokenizer: Any = None) -> Any:
        """Return the `task`; `tokenizer` is None unless it is `tokenized`."""
        build: Any = self.task  # subclasses declare their parts
        return build(self, tokenizer)


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Held-out data: batches in a fixed order, and counts of their text (see `TextRows.count`)."""

    batches: HeldOutBatches
    counts: dict[str, float]


def label_count(batch: Batch) -> int:
    """Return the number of labels that are not `IGNORED`."""
    return int((batch["labels"] != IGNORED).sum())


class TaskRows(abc.ABC):
    """The part of a task that prepares rows of data and arranges them in batches.

    `notes`: sentences for the user about the prepared data. `continues`: whether a batch continues the texts
    of the previous batch, row by row.
    """

    continues: bool = False

    def __init__(self) -> None:
        self.notes: list[str] = []

    @abc.abstractmethod
    def training_batches(self, rows: Any, seed: int) -> TrainingBatches:
        """Return batches of `rows` for training, in a random order from `seed`."""

    @abc.abstractmethod
    def held_out(self, rows: Rows) -> HeldOut:
        """Return `rows` prepared for evaluation."""


class Architecture(Protocol):
    """The part of a task that states which model it needs."""

    def adapt(self, config: Any) -> Any:
        """Return `config` with the sizes and the head of the task; `InputError` if it does not fit."""
        ...


class ModelLoss:
    """The part of a task that defines its loss: here the loss that the model returns with labels.

    `plain`: whether this is the model's loss, so that processes may share a text (context parallelism) and a
    student may learn its soft labels. An objective with another loss, or with a second model, sets False.
    """

    plain: ClassVar[bool] = True

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the training loss: a mean over `weight(batch)` labels."""
        return model(**batch).loss

    def loss_after(self, model: nn.Module, batch: Batch, state: State | None) -> tuple[Tensor, State | None]:
        """Return `loss` with the state after the previous batch, and the state after this batch."""
        output = model(**batch, state=state, use_cache=True)
        return output.loss, output.state.detach()

    def weight(self, batch: Batch) -> int:
        """Return the number of labels in the mean of the loss of `batch`."""
        return label_count(batch)

    def training_module(self, model: Transformer, run: Path | None = None) -> nn.Module:
        """Return the module that is trained and measured: `model`, or a module of it and an auxiliary model.

        An auxiliary model is new, or read from the folder `run` of a finished run.
        """
        return model

    def auxiliary_models(self, module: nn.Module) -> dict[str, Transformer]:
        """Return the auxiliary models in `module`, by the name of their folder in the folder of the run."""
        return {}


class Metrics(abc.ABC):
    """The part of a task that measures a model: sums over held-out batches, and metrics from the sums.

    `best`: the metric that compares checkpoints, and `direction` whether less ("min") or more ("max") is
    better. `sums`: the number of elements of `totals`.
    """

    best: str = "loss"
    direction: Literal["min", "max"] = "min"
    sums: int

    @abc.abstractmethod
    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return numbers (float64 [sums]); `values` gets their sums over all batches."""

    @abc.abstractmethod
    def values(self, totals: list[float], counts: dict[str, float]) -> dict[str, float]:
        """Return the metrics of held-out data from the sums of `totals` and the counts of its text."""

    @torch.no_grad()
    def measure(self, model: nn.Module, held: HeldOut, workers: Workers = SINGLE_PROCESS) -> dict[str, float]:
        """Return metrics of `model` (in evaluation mode) on held-out data, the same in every process."""
        device = next(model.parameters()).device

        def totals(batch: Batch) -> Tensor:
            return self.totals(model, batch_to_device(batch, device))

        batches = (batch for _, batch in held.batches.epoch(0))
        zero = torch.zeros(self.sums, dtype=torch.float64, device=device)
        return self.values(workers.total(totals, batches, zero), held.counts)


class Task:
    """A training task, composed of its parts; a subclass declares them in its `__init__`.

    `rows` prepares data and arranges batches, `architecture` states the model that the task needs,
    `objective` defines the loss and `metrics` measures. The methods of a subclass predict for the user.
    `best` and `direction` come from the metrics, `notes` from the rows.
    """

    command: ClassVar[str]
    """The command for a model of the task, if there is one."""
    unit: ClassVar[str] = "tokens"
    """What the speed of training counts."""
    needs_float32: ClassVar[bool] = False
    """Whether the default precision is float32 on a GPU too."""
    calibrates: ClassVar[bool] = False
    """Whether the outputs are probabilities of labels, whose temperature can be fitted after training."""

    def __init_subclass__(cls, config: type[TaskConfig] | None = None):
        super().__init_subclass__()
        if config is not None:
            config.task = cls

    def __init__(
        self,
        config: Any,
        tokenizer: Any = None,
        *,
        rows: Any,
        architecture: Any,
        metrics: Any,
        objective: Any = None,
    ):
        self.config, self.tokenizer, self.batch_tokens = config, tokenizer, config.batch_tokens
        self.rows: Any = rows
        self.architecture: Any = architecture
        self.metrics: Any = metrics
        self.objective: Any = objective or ModelLoss()
        self.best: str = metrics.best
        self.direction: Literal["min", "max"] = metrics.direction
        self.notes: list[str] = rows.notes

    @property
    def finishes(self) -> bool:
        """Return whether `finish` has metrics."""
        return type(self).finish is not Task.finish

    def adapt(self, config: Any) -> Any:
        """Return `config` with the sizes and the head of this task; `InputError` if it does not fit."""
        return self.architecture.adapt(config)

    def measure_rows(
        self, model: nn.Module, rows: Rows, workers: Workers = SINGLE_PROCESS
    ) -> dict[str, float]:
        """Return metrics of a finished model on `rows`, the same in every process."""
        return self.metrics.measure(model, self.rows.held_out(rows), workers)

    def finish(self, model: nn.Module, rows: Rows, workers: Workers = SINGLE_PROCESS) -> dict[str, float]:
        """Return metrics of generated text, too slow during training; empty for most tasks."""
        return {}

    def score(self, model: nn.Module, rows: Rows, workers: Workers = SINGLE_PROCESS) -> dict[str, float]:
        """Return all metrics of a finished model on `rows`, the same in every process."""
        return {**self.measure_rows(model, rows, workers), **self.finish(model, rows, workers)}


class TaskWithData:
    """A task with its data: a `polyformer.training.TrainingTask`."""

    def __init__(self, task: Task, splits: Splits, seed: int):
        self.task = task
        self.train = task.rows.training_batches(splits.train, seed)
        self.valid = None if splits.validation is None else task.rows.held_out(splits.validation)
        self.test = splits.test
        self.best, self.continues = task.best, task.rows.continues
        self.direction: Literal["min", "max"] = task.direction
        self.weight: Any = task.objective.weight
        self.supports_context_parallel: bool = task.objective.plain
        self.needs_float32, self.unit = task.needs_float32, task.unit

    def batches(self, epoch: int, skip: int, rank: int, world: int) -> Iterator[Batch]:
        """Yield the batches of an epoch after the first `skip` for process `rank` of `world`.

        If batches continue each other's texts, yield the rows of the process of all batches.
        """
        if isinstance(self.train, Stream):
            yield from (batch for _, batch in share(self.train.epoch(epoch), skip, rank, world))
            return
        if isinstance(self.train, MappedBatches):
            yield from self.train.batches(epoch, skip + rank, world)
            return
        if self.continues:
            for _, batch in self.train.epoch(epoch, position=(0, skip)):
                yield _rows(batch, rank, world)
            return
        yield from (
            batch for _, batch in islice(self.train.epoch(epoch, position=(0, skip)), rank, None, world)
        )

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the training loss of `batch`."""
        return self.task.objective.loss(model, batch)

    def loss_after(self, model: nn.Module, batch: Batch, state: State | None) -> tuple[Tensor, State | None]:
        """Return the loss of a recurrent model and its state after `batch`."""
        return self.task.objective.loss_after(model, batch, state)

    def evaluate(self, model: nn.Module, accelerator: EvaluationGroup) -> dict[str, float]:
        """Return the metrics of the validation data, empty without them."""
        if self.valid is None:
            return {}
        return self.task.metrics.measure(model, self.valid, Workers.of(accelerator))

    def calibrate(self, model: nn.Module, accelerator: EvaluationGroup) -> Calibration | None:
        """Return the temperature for the validation data; None without them or without labels."""
        head: Any = getattr(model, "head", None)
        if self.valid is None or not self.task.calibrates or not head.divide_logits(1.0):
            return None
        workers, device = Workers.of(accelerator), next(model.parameters()).device
        rows: list[tuple[list[float], int]] = []
        for _, batch in share(self.valid.batches.epoch(0), 0, workers.rank, workers.world):
            logits = model(**batch_to_device(batch, device)).logits
            rows += zip(logits.double().tolist(), batch["labels"].tolist())
        gathered = workers.gather(rows)
        if not gathered:
            return None
        logits, labels = zip(*gathered)
        return calibrated(torch.tensor(logits).double(), torch.tensor(labels))

    def divide_logits(self, model: Any, temperature: float) -> None:
        """Divide the logits by a temperature, in the weights of `model` or in their shard."""
        model.head.divide_logits(temperature)

    def evaluate_final(self, model: nn.Module, accelerator: EvaluationGroup) -> dict[str, dict[str, float]]:
        """Return the metrics of the test data, empty without them."""
        if self.test is None:
            return {}
        return {"test": self.task.measure_rows(model, self.test, Workers.of(accelerator))}


def _rows(batch: Batch, rank: int, world: int) -> Batch:
    """Return the rows of `batch` for process `rank` of `world`; raise `InputError` for uneven shares."""
    if "number" in batch and world > 1:
        raise InputError(f"task: what makes its own data is trained by one process, not by {world}")
    rows = len(next(iter(batch.values())))
    if rows % world:
        raise InputError(
            f"task: {rows} rows that continue their texts cannot be dealt evenly to {world} processes; "
            "change batch_tokens or row_length, whose quotient they are, or the number of processes"
        )
    return {name: share_rows(tensor, rank, world) for name, tensor in batch.items()}
