"""The interface between the training loop and tasks: batches, a loss, shared evaluations, calibration.

A task whose outputs are probabilities of labels may be calibrated after training, by temperature scaling (Guo
et al. 2017, section 4.2):

    p = softmax(z / T)        T minimizes the negative log-likelihood (NLL) on validation rows

The order of the labels does not change for any T > 0. The mean NLL is convex in b = 1 / T, with the
derivative

    mean over rows of sum_k p_k (z_k - z_y)

which increases with b. Its root is found by bisection. There is no finite T > 0 if the derivative is negative
for all b (every row is predicted correctly) or positive for all b (equal probabilities would be better).

Processes share an evaluation. Its results can be cached in files, so that an interrupted evaluation can
resume. The key of a result is the digest of everything that it depends on: the model, its settings and the
batch or text. Another model, other data or another batch size therefore has other keys, and any number of
processes can use the results of any earlier number: each process appends to a separate file, and reads all
files at the start.
"""

import dataclasses
import hashlib
import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Protocol, Self, TypeVar, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from polyformer.core.files import open_file, reading, writing
from polyformer.core.state import State
from polyformer.training.machine import ReplicaGroup

BINS = 15
"""Bins of the expected calibration error, as in the paper."""

HALVINGS = 60
LOWEST, HIGHEST = 1e-3, 1e3
"""The range of b."""


@dataclass(frozen=True)
class Reliability:
    """The calibration of probabilities on some rows.

    nll: mean negative log-likelihood, in nats. error: the expected calibration error, 0 to 1. bins: mean
    probability of the predicted label, accuracy and number of rows of each bin with rows.
    """

    nll: float
    error: float
    bins: Sequence[tuple[float, float, int]]

    @classmethod
    def of(cls, logits: Tensor, labels: Tensor) -> "Reliability":
        """Return the calibration of softmax(logits) for logits [rows, labels] and right labels [rows].

            ECE = sum over bins of (rows of the bin / rows) |accuracy - mean probability|

        Guo et al. 2017, equation 3; a row is in the bin of the probability of its predicted label.
        """
        log_p = logits.double().log_softmax(-1)
        sure, predicted = log_p.exp().max(-1)
        right = (predicted == labels).double()
        places = (sure * BINS).ceil().long().clamp(1, BINS) - 1  # a bin includes its upper edge
        rows = torch.bincount(places, minlength=BINS).double()
        sums = [torch.zeros(BINS).double().index_add(0, places, x) for x in (sure, right)]
        error = float((sums[1] - sums[0]).abs().sum() / len(labels))
        bins = [(float(p / n), float(hits / n), int(n)) for p, hits, n in zip(*sums, rows.tolist()) if n]
        nll = float(-log_p.gather(-1, labels[:, None]).mean())
        return cls(nll, error, bins)


@dataclass(frozen=True)
class Calibration:
    """The temperature of a model (1: unchanged), and its calibration on validation data before and after."""

    temperature: float
    before: Reliability
    after: Reliability

    @property
    def changes(self) -> bool:
        """Return whether the temperature changes the probabilities."""
        return self.temperature != 1

    def note(self) -> str:
        """Return the result in a line."""
        number = sum(count for _, _, count in self.before.bins)
        rows = f"{number:,} validation row{'' if number == 1 else 's'}"
        before = f"NLL {self.before.nll:.4g}, expected calibration error {self.before.error:.4g}"
        if not self.changes:
            return f"temperature 1, no other lowers the NLL of {rows}: {before}"
        after = f"NLL {self.after.nll:.4g}, expected calibration error {self.after.error:.4g}"
        return f"temperature {self.temperature:.4g} on {rows}: {before} before; {after} after"

    def record(self) -> dict[str, Any]:
        """Return plain data for run.json."""
        sides = {
            name: {"nll": side.nll, "calibration_error": side.error, "bins": [list(row) for row in side.bins]}
            for name, side in (("before", self.before), ("after", self.after))
        }
        return {"temperature": self.temperature, **sides}


def calibrated(logits: Tensor, labels: Tensor) -> Calibration:
    """Return the calibration for logits [rows, labels] and right labels [rows].

    The temperature is 1 if there is no finite temperature, or none that lowers the NLL.
    """
    before = Reliability.of(logits, labels)
    temperature = fitted_temperature(logits, labels)
    if temperature is None:
        return Calibration(1.0, before, before)
    after = Reliability.of(logits.double() / temperature, labels)
    if not after.nll < before.nll:
        return Calibration(1.0, before, before)
    return Calibration(temperature, before, after)


def fitted_temperature(logits: Tensor, labels: Tensor) -> float | None:
    """Return the temperature that minimizes the NLL; None if there is no minimum within the range."""
    z = logits.double()
    difference = z - z.gather(-1, labels[:, None])  # no rounding changes the sign of a row's derivative

    def slope(b: float) -> float:
        return float(((z * b).softmax(-1) * difference).sum(-1).mean())

    low, high = LOWEST, HIGHEST
    if not slope(low) < 0 < slope(high):
        return None
    for _ in range(HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    return 1 / (low * high) ** 0.5


Batch = dict[str, torch.Tensor]
Item = TypeVar("Item")


@dataclass(frozen=True)
class StepBatches:
    """The batches that a process computes in one step."""

    batches: list[Batch]  # at least one
    weights: list[int]  # labelled tokens per batch
    total: float | torch.Tensor  # labelled tokens of the step, over all processes
    tokens: int  # tokens read by this process


class EvaluationGroup(Protocol):
    """The processes that share an evaluation: the part of an `accelerate.Accelerator` that tasks use."""

    @property
    def process_index(self) -> int:
        """Return the index of this process."""
        ...

    @property
    def num_processes(self) -> int:
        """Return the number of processes."""
        ...

    def reduce(self, tensor: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
        """Return the sum ("sum") of the tensors of all processes, which have the same shape."""
        ...


@runtime_checkable
class TrainingTask(Protocol):
    """A training task. The loop uses tasks only through this interface."""

    @property
    def best(self) -> str:
        """Return the name of the metric of `evaluate` that determines the best checkpoint."""
        ...

    @property
    def direction(self) -> Literal["min", "max"]:
        """Return whether a smaller ("min") or a larger ("max") `best` metric is better."""
        ...

    def batches(self, epoch: int, skip: int, rank: int, world: int) -> Iterator[Batch]:
        """Yield the batches of one epoch for this process, as CPU tensors.

        An epoch is one fixed sequence of batches, the same on every process and in every call: a function
        only of the task's seed and `epoch` (0, 1, ...), never of global random state. The first `skip`
        batches of the sequence (counted over all processes) are already used; of the rest this process takes
        the batches `rank`, `rank + world`, `rank + 2 * world`, ... (`share` below implements this; if a batch
        is expensive to make, skip without making it). Batches may differ in size, and there may be any number
        of them.
        """
        ...

    def weight(self, batch: Batch) -> int:
        """Return the number of labels (tokens or items) in the mean of `loss`, from the CPU tensors."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the mean loss over the labelled tokens of `batch`: a differentiable scalar.

        `model` may be wrapped (data parallel, compiled): call it as `model(**batch)`, and read no attribute.
        """
        ...

    def evaluate(self, model: nn.Module, accelerator: EvaluationGroup) -> dict[str, float]:
        """Return metrics on held-out data, the same on every process; called on all, without gradients.

        `model` is the plain module in evaluation mode. Share the work by `accelerator.process_index` and
        `accelerator.num_processes`, add up with `accelerator.reduce` or `accelerator.gather`.
        An empty mapping means that there is no evaluation data.
        """
        ...


@runtime_checkable
class RecurrentTask(TrainingTask, Protocol):
    """A task with batches that may continue the texts of the previous batch, row by row.

    In this case each process takes its rows of every batch (`share_rows`), and `skip` of `batches` counts
    batches that all of them have read. The loss of a batch without a labelled token is 0.
    """

    @property
    def continues(self) -> bool:
        """Return whether batches continue the previous texts."""
        ...

    def loss_after(
        self, model: nn.Module, batch: Batch, state: State | None
    ) -> tuple[torch.Tensor, State | None]:
        """Return the loss, as `loss`, of a recurrent model, and its state after the batch, detached.

        state: the state after the previous batch; None before the first batch.
        """
        ...


@runtime_checkable
class FinalMetricsTask(TrainingTask, Protocol):
    """A task with additional metrics of the final weights."""

    def evaluate_final(self, model: nn.Module, accelerator: EvaluationGroup) -> dict[str, dict[str, float]]:
        """Return metrics by the name of their data; called in the same way as `evaluate`."""
        ...


@runtime_checkable
class CalibratedTask(TrainingTask, Protocol):
    """A task whose probabilities can be calibrated on held-out data."""

    def calibrate(self, model: nn.Module, accelerator: EvaluationGroup) -> Calibration | None:
        """Return the temperature of the logits of `model`; None without held-out data or without labels.

        Called in the same way as `evaluate`, with the final weights, which it does not change.
        """
        ...

    def divide_logits(self, model: nn.Module, temperature: float) -> None:
        """Divide all logits of `model` by a temperature, in its weights, whole or divided among processes."""
        ...


def share(sequence: Iterable[Item], skip: int, rank: int, world: int) -> Iterator[Item]:
    """Return the items of `sequence` after the first `skip` for process `rank` of `world`."""
    return islice(sequence, skip + rank, None, world)


def share_rows(tensor: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """Return the rows of `tensor` [B, ...] for process `rank` of `world`.

    The rows are contiguous: the concatenated shares of all processes are the tensor.
    """
    return tensor.tensor_split(world)[rank]


CHUNK = 64
"""Number of texts that are computed together; an interruption loses at most these results."""


class CachedResults:
    """The cached results in `folder` for the model identified by `subject`.

    reused, computed: the numbers of results that this process found in the cache, and that it computed.

    Raises:
        InputError: a folder that cannot be read or written, a full disk.
    """

    def __init__(self, folder: Path, subject: str, rank: int = 0) -> None:
        self.subject, self.reused, self.computed = subject, 0, 0
        self.file = folder / f"process-{rank}.jsonl"
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self.values: dict[str, Any] = {}
        for file in sorted(folder.glob("process-*.jsonl")):
            self.values |= intact_lines(file)
        self.append("\n")  # terminates a line truncated by a kill

    def tensor(self, function: Callable[[Any], Tensor], batch: Any) -> Tensor:
        """Return `function(batch)`, float64 numbers."""
        key = self.key("batch", batch)
        if key not in self.values:
            self.store(key, function(batch).tolist())
        else:
            self.reused += 1
        return torch.tensor(self.values[key], dtype=torch.float64)

    def each(self, function: Callable[[list[Any]], Sequence[Any]], items: Sequence[Any]) -> list[Any]:
        """Return `function(items)`, a result for each item that is serializable as JSON."""
        keys = [self.key("text", item) for item in items]
        missing = [number for number, key in enumerate(keys) if key not in self.values]
        self.reused += len(items) - len(missing)
        for start in range(0, len(missing), CHUNK):
            portion = missing[start : start + CHUNK]
            for number, value in zip(portion, function([items[number] for number in portion]), strict=True):
                self.store(keys[number], value)
        return [self.values[key] for key in keys]

    def key(self, kind: str, value: Any) -> str:
        """Return the key of a result."""
        digest = hashlib.blake2b(f"{self.subject} {kind}".encode(), digest_size=20)
        update_digest(digest, value)
        return digest.hexdigest()

    def store(self, key: str, value: Any) -> None:
        """Save a result in the file."""
        self.values[key] = value
        self.computed += 1
        content = json.dumps([key, value])
        self.append(f"{checksum(content)} {content}\n")

    def append(self, text: str) -> None:
        """Append to the file of this process."""
        with writing(self.file), self.file.open("ab") as file:
            file.write(text.encode())


def intact_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values in a file, without truncated or damaged lines."""
    with reading(path), io.TextIOWrapper(open_file(path), encoding="utf-8", errors="replace") as lines:
        for line in lines:
            check, _, content = line.rstrip("\n").partition(" ")
            if check and check == checksum(content):
                key, value = json.loads(content)
                yield key, value


def checksum(content: str) -> str:
    """Return the checksum of a line."""
    return hashlib.blake2b(content.encode(), digest_size=4).hexdigest()


def update_digest(digest: hashlib.blake2b, value: Any) -> None:
    """Update `digest` with a value: tensors, arrays, dataclasses, mappings, lists and plain data."""
    if isinstance(value, Tensor):
        value = value.detach().cpu().contiguous().numpy()
    if isinstance(value, np.ndarray):
        digest.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    elif dataclasses.is_dataclass(value):
        update_digest(digest, {field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    elif isinstance(value, dict):
        for name in sorted(value):
            update_digest(digest, name)
            update_digest(digest, value[name])
    elif isinstance(value, list | tuple):
        digest.update(f"{len(value)} values".encode())
        for item in value:
            update_digest(digest, item)
    else:
        digest.update(f"{type(value).__name__} {json.dumps(value)}".encode())


@dataclasses.dataclass(frozen=True)
class Workers:
    """The processes of an evaluation, by default a single process.

    `add` sums a tensor over them, `gather` concatenates their lists, in every process. Cached `results` are
    not computed again.
    """

    rank: int = 0
    world: int = 1
    add: Callable[[Tensor], Tensor] = lambda total: total
    gather: Callable[[list[Any]], list[Any]] = lambda values: values
    results: CachedResults | None = None

    @classmethod
    def of(cls, accelerator: EvaluationGroup) -> Self:
        """Return the processes of `accelerator`."""
        if accelerator.num_processes == 1:
            return cls()
        from accelerate.utils import gather_object

        add = partial(accelerator.reduce, reduction="sum")
        # Of the processes that share a replica each has the same values, which count once.
        gather = accelerator.gather_lists if isinstance(accelerator, ReplicaGroup) else gather_object
        return cls(accelerator.process_index, accelerator.num_processes, add, gather)  # type: ignore[arg-type]

    def total(self, function: Callable[[Any], Tensor], batches: Iterable[Any], zero: Tensor) -> list[float]:
        """Return `zero` plus the sum of `function(batch)` over all batches, computed in shares."""
        known = function if self.results is None else partial(self.results.tensor, function)
        for batch in share(batches, 0, self.rank, self.world):
            zero = zero + known(batch).to(zero.device)
        return self.add(zero).tolist()

    def each(self, function: Callable[[list[Any]], Sequence[Any]], items: Sequence[Any]) -> list[Any]:
        """Return `function(items)`, a result per item in order, in every process, computed in shares."""
        own = range(self.rank, len(items), self.world)
        known = function if self.results is None else partial(self.results.each, function)
        values = known([items[number] for number in own]) if own else []
        return [value for _, value in sorted(self.gather([*zip(own, values)]), key=lambda pair: pair[0])]


SINGLE_PROCESS = Workers()
"""A single process."""
