"""Shared parts of tasks that predict one of several named labels."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from polyformer.core.errors import InputError, quote
from polyformer.core.imports import needs_extra
from polyformer.data import Tokenizer
from polyformer.data.rows.batching import Batch
from polyformer.nn.heads import ClassifyConfig, HeadConfig, TagConfig
from polyformer.training.tasks.base import Rows, Task
from polyformer.training.tasks.text import EncoderTask

LabelMetric = Literal["f1", "matthews"]


def check_labels(labels: Sequence[str] | None) -> None:
    """Raise `InputError` for fewer than two different labels; None means not yet known."""
    if labels is not None and len(set(labels)) < 2:
        raise InputError(f"labels: expected two or more different ones, got {', '.join(labels) or 'none'}")


def labels_of(rows: Rows, what: str, way: str = "") -> tuple[str, ...]:
    """Return the labels of the training `rows`, sorted.

    Raises `InputError` for fewer than two labels, and for labels that differ only in case. `what` and `way`
    are parts of the first message: the type of a row, and an alternative.
    """
    labels = {str(row["label"]) for row in rows}
    if len(labels) < 2:
        raise InputError(
            f"labels: every training {what} has the same one, {quote(labels.pop())}; two or more are "
            f"needed{way}"
        )
    spellings: dict[str, str] = {}
    for label in sorted(labels):
        other = spellings.setdefault(label.casefold(), label)
        if other != label:
            raise InputError(
                f"labels: {quote(other)} and {quote(label)} differ only in upper and lower case; correct the "
                "rows, or if they are two labels, list all labels with --task.labels '[A, B]'"
            )
    return tuple(sorted(labels))


def label_metrics(
    names: Sequence[LabelMetric], confusion: Sequence[float], labels: Sequence[str]
) -> dict[str, float]:
    """Return metrics by name, from a flattened confusion matrix [label, prediction], by scikit-learn.

    f1: the F1 of the last of two labels, "1" of "0" and "1". matthews: Matthews' correlation coefficient, 0
    if all predictions are equal. Raises `InputError` for f1 of more labels.
    """
    if not names:
        return {}
    if "f1" in names and len(labels) != 2:
        raise InputError(f"metrics: f1 is of two labels, got {len(labels)}; f1_macro is of any number")
    with needs_extra("metrics", "task.metrics: f1 and matthews are computed by scikit-learn"):
        from sklearn.metrics import f1_score, matthews_corrcoef
    numbers = np.arange(len(labels))
    # scikit-learn reads rows, not a matrix: each cell is a row with its count as the weight.
    cells = np.repeat(numbers, len(labels)), np.tile(numbers, len(labels))
    binary_f1: Any = f1_score  # its annotation of zero_division lacks numbers
    values = {
        "f1": lambda: binary_f1(*cells, sample_weight=confusion, zero_division=0.0),
        "matthews": lambda: matthews_corrcoef(*cells, sample_weight=confusion),
    }
    return {name: float(values[name]()) for name in names}


class Labelled:
    """A mixin with the names of labels and their numbers."""

    labels: tuple[str, ...]

    def name_labels(self, names: tuple[str, ...] | None) -> None:
        """Set the names of the labels; raise `InputError` for None."""
        if names is None:
            raise InputError("labels: not known before the training data are; call resolve(rows)")
        self.labels = names
        self._ids = {name: number for number, name in enumerate(names)}

    def label_id(self, label: str) -> int:
        """Return the number of a label; raise `InputError` for a label that is not in the training data."""
        if label not in self._ids:
            names = f"{', '.join(map(repr, self.labels)):.200}"
            raise InputError(
                f"label: {quote(label)} was not seen in training, which had {names}; correct its rows or "
                "leave them out"
            )
        return self._ids[label]


class SingleLabelTask(Labelled, Task):
    """A task that predicts one label per row.

    Metrics: loss (nats per row), accuracy, f1_macro, the mean F1 over the labels, and majority, the
    accuracy of always predicting the most frequent label in these data. A label without rows and
    predictions counts as F1 0.
    """

    best = "accuracy"
    direction = "max"

    def name_labels(self, names: tuple[str, ...] | None) -> None:
        """Set the names of the labels; their confusion matrix is part of the sums."""
        super().name_labels(names)
        self.sums = 1 + len(self.labels) ** 2

    @abc.abstractmethod
    def probabilities(self, model: nn.Module, rows: Sequence[Any]) -> Tensor:
        """Return the probability [rows, labels] of each label; rows need no label."""

    def divide_logits(self, model: Any, temperature: float) -> bool:
        """Divide all logits of `model` by a temperature, in the weights of its head."""
        return model.head.divide_logits(temperature)

    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the summed loss, and the flattened confusion matrix [label, prediction]."""
        output, labels = model(**batch), batch["labels"]
        count = len(self.labels)
        confusion = torch.bincount(labels * count + output.logits.argmax(-1), minlength=count**2)
        return torch.cat([(output.loss.double() * len(labels)).unsqueeze(0), confusion.double()])

    def metrics(self, totals: list[float], counts: dict[str, float]) -> dict[str, float]:
        """Return the metrics of the class."""
        confusion = np.array(totals[1:]).reshape(len(self.labels), -1)  # [label, prediction]
        correct, number = np.diag(confusion), max(confusion.sum(), 1)
        f1 = 2 * correct / np.maximum(confusion.sum(0) + confusion.sum(1), 1)
        metrics = {
            "loss": totals[0] / number,
            "accuracy": correct.sum() / number,
            "f1_macro": f1.mean(),
            "majority": confusion.sum(1).max() / number,
        }
        return {name: float(value) for name, value in metrics.items()}


class LabelTask(Labelled, EncoderTask):
    """A task of an encoder with a head that has one logit for each of `labels`."""

    head_type: ClassVar[type[ClassifyConfig] | type[TagConfig]]

    def __init__(self, config: Any, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        self.name_labels(config.labels)
        self.head: HeadConfig = self.head_type(num_labels=len(self.labels))

    def fit_head(self, head: HeadConfig) -> HeadConfig:
        """Return the model's head with one logit per label if it has the right type, else a new head."""
        if isinstance(head, self.head_type):
            return dataclasses.replace(head, num_labels=len(self.labels))
        return self.head
