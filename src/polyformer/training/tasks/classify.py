"""Classification: assign a label to a text or a pair of texts; measured by accuracy and macro F1."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

from polyformer.core.errors import InputError
from polyformer.data.rows.batching import Row
from polyformer.nn.heads import ClassifyConfig
from polyformer.training.tasks.base import SINGLE_PROCESS, Rows, Workers
from polyformer.training.tasks.labels import (
    LabelMetric,
    LabelTask,
    SingleLabelTask,
    check_labels,
    label_metrics,
    labels_of,
)
from polyformer.training.tasks.text_rows import PairRows, TextRows, TextRowsConfig

GroupMetric = Literal["exact_match", "accuracy_by_group"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassificationConfig(TextRowsConfig):
    """Text classification: assign a label to a text."""

    labels: tuple[str, ...] | None = None  # by default the sorted labels of the training data
    metrics: tuple[LabelMetric, ...] = ()  # besides accuracy and macro F1

    needs: ClassVar[tuple[str, ...]] = ("text", "label")
    kind: ClassVar[str] = "classify"
    paper: ClassVar[str] = "Devlin et al. 2019, section 4.1"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_labels(self.labels)

    def resolve(self, rows: Rows) -> Self:
        """Return this with the labels of `rows`, sorted; raise `InputError` for fewer than two."""
        if self.labels is not None:
            return self
        return dataclasses.replace(self, labels=labels_of(rows, "text"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairClassificationConfig(ClassificationConfig):
    """Sentence-pair classification: assign a label to a pair of texts, such as whether they mean the same."""

    needs: ClassVar[tuple[str, ...]] = ("text", "pair", "label")
    text_columns: ClassVar[tuple[str, ...]] = ("text", "pair")
    shortest: ClassVar[int] = 6
    kind: ClassVar[str] = "classify_pair"
    paper: ClassVar[str] = "Devlin et al. 2019, section 4.1 (QQP, QNLI)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedClassificationConfig(PairClassificationConfig):
    """Classification of text pairs in groups, such as the answers to a question."""

    group_metrics: tuple[GroupMetric, ...] = ("exact_match",)

    needs: ClassVar[tuple[str, ...]] = ("text", "pair", "label", "group")
    kind: ClassVar[str] = "classify_grouped"
    paper: ClassVar[str] = "Wang et al. 2019 (SuperGLUE), MultiRC; Conneau et al. 2018 (XNLI)"


class Classification(SingleLabelTask, LabelTask, TextRows, config=ClassificationConfig):
    """Classification of a text, with the metrics of `SingleLabelTask` and `label_metrics`."""

    config: ClassificationConfig
    command = "classify"
    head_type = ClassifyConfig

    def prepare(self, rows: Sequence[Row]) -> list[Row]:
        """Return the token ids and the number of the label of each row."""
        labels = [self.label_id(str(row["label"])) for row in rows]
        return [{**row, "labels": label} for row, label in zip(self.encode_rows(rows), labels)]

    def probabilities(self, model: nn.Module, rows: Sequence[Row]) -> Tensor:
        """Return the probability [rows, labels] of each label of the rows' texts."""
        results = torch.zeros(len(rows), len(self.labels))
        for numbers, logits in self.logits(model, rows):
            results[numbers] = logits.softmax(-1)
        return results

    def metrics(self, totals: list[float], counts: dict[str, float]) -> dict[str, float]:
        """Return the metrics of the class."""
        extra = label_metrics(self.config.metrics, totals[1:], self.labels)
        return {**super().metrics(totals, counts), **extra}

    def classify(
        self, model: nn.Module, texts: Sequence[str], pairs: Sequence[str] | None = None
    ) -> list[dict[str, float]]:
        """Return the probability of each label for every text, or text and its pair."""
        rows = paired(texts, pairs, wanted="pair" in self.config.needs)
        return [dict(zip(self.labels, shares)) for shares in self.probabilities(model, rows).tolist()]


class PairClassification(PairRows, Classification, config=PairClassificationConfig):
    """Classification of a pair of texts."""


class GroupedClassification(PairClassification, config=GroupedClassificationConfig):
    """Classification of text pairs, with metrics of groups in `evaluate`.

    exact_match: the share of groups with the right label for every pair. accuracy_by_group: accuracy_NAME for
    each group.
    """

    config: GroupedClassificationConfig

    def finish(self, model: nn.Module, rows: Rows, workers: Workers = SINGLE_PROCESS) -> dict[str, float]:
        """Return the metrics of groups."""
        pairs = list(rows)
        predicted = workers.each(partial(self._labels, model), pairs)
        right: dict[str, list[bool]] = {}
        for row, label in zip(pairs, predicted):
            right.setdefault(str(row["group"]), []).append(label == str(row["label"]))
        metrics = {}
        if "exact_match" in self.config.group_metrics:
            metrics["exact_match"] = float(np.mean([all(group) for group in right.values()]))
        if "accuracy_by_group" in self.config.group_metrics:
            metrics |= {f"accuracy_{name}": float(np.mean(group)) for name, group in sorted(right.items())}
        return metrics

    def _labels(self, model: nn.Module, rows: Sequence[Row]) -> list[str]:
        return [self.labels[number] for number in self.probabilities(model, rows).argmax(-1).tolist()]


def paired(texts: Sequence[str], pairs: Sequence[str] | None, wanted: bool) -> list[Row]:
    """Return rows of {text} or {text, pair}, as the task requires; raise `InputError` for the other form."""
    if wanted != (pairs is not None):
        expected = (
            "a second text for each, the task's pair" if wanted else "one text, for which it was trained"
        )
        raise InputError(f"pair: expected {expected}, got {'none' if wanted else 'two'}")
    if pairs is None:
        return [{"text": text} for text in texts]
    return [{"text": text, "pair": pair} for text, pair in zip(texts, pairs, strict=True)]
