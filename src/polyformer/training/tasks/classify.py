"""Labels and numbers of texts and of pairs of texts.

    kind               predicts, for            measured by
    classify           a label, a text          accuracy, macro F1
    classify_pair      a label, a pair          accuracy, macro F1
    classify_grouped   a label, a pair          also by groups of pairs
    tag                a label, each word       entity F1 (BIO)
    regress_pair       a number, a pair         correlations with the labels

**regress_pair**: a number such as the similarity of two texts; the loss is the mean squared error. Cer et al.
2017 (STS-B); Devlin et al. 2019, section 4.1.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

from polyformer.core.errors import InputError, quote
from polyformer.core.host_values import batch_to_device
from polyformer.core.imports import needs_extra
from polyformer.data import Tokenizer
from polyformer.data.rows import Batch, Row
from polyformer.nn.heads import ClassifyConfig
from polyformer.training import share
from polyformer.training.task import SINGLE_PROCESS, Workers
from polyformer.training.tasks.base import HeldOut, Rows
from polyformer.training.tasks.labels import (
    Confusion,
    LabelMetric,
    Labels,
    SingleLabelTask,
    SingleTexts,
    TextPairs,
    TextRowsConfig,
    check_labels,
    labels_of,
)
from polyformer.training.tasks.text import (
    Perplexity,
    TextArchitecture,
    TextTask,
)

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


class Classification(SingleLabelTask, TextTask, config=ClassificationConfig):
    """Classification of a text, measured by `Confusion` and the chosen `metrics`."""

    config: ClassificationConfig
    rows: SingleTexts
    command = "classify"
    reads: ClassVar[type[SingleTexts]] = SingleTexts
    """The rows: of a text, or of two."""

    def __init__(self, config: ClassificationConfig, tokenizer: Tokenizer):
        labels = Labels(config.labels)
        self.labels = labels.names
        rows = self.reads(config, tokenizer, labels.number_of_row)
        options: dict[str, Any] = {"num_labels": len(labels)}
        super().__init__(
            config,
            tokenizer,
            rows=rows,
            architecture=TextArchitecture(
                "encoder",
                ClassifyConfig(**options),
                tokenizer,
                config.max_length,
                head_options=options,
                tables={"type_vocab_size": rows.token_types},
            ),
            metrics=Confusion(labels, config.metrics),
        )

    def probabilities(self, model: nn.Module, rows: Sequence[Row]) -> Tensor:
        """Return the probability [rows, labels] of each label of the rows' texts."""
        results = torch.zeros(len(rows), len(self.labels))
        for numbers, logits in self.rows.logits(model, rows):
            results[numbers] = logits.softmax(-1)
        return results

    def classify(
        self, model: nn.Module, texts: Sequence[str], pairs: Sequence[str] | None = None
    ) -> list[dict[str, float]]:
        """Return the probability of each label for every text, or text and its pair."""
        rows = paired(texts, pairs, wanted="pair" in self.config.needs)
        return [dict(zip(self.labels, shares)) for shares in self.probabilities(model, rows).tolist()]


class PairClassification(Classification, config=PairClassificationConfig):
    """Classification of a pair of texts."""

    reads = TextPairs


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairRegressionConfig(TextRowsConfig):
    """Regression: assign a number to a pair of texts, such as their similarity."""

    needs: ClassVar[tuple[str, ...]] = ("text", "pair", "label")
    text_columns: ClassVar[tuple[str, ...]] = ("text", "pair")
    shortest: ClassVar[int] = 6
    kind: ClassVar[str] = "regress_pair"
    paper: ClassVar[str] = "Devlin et al. 2019, section 4.1 (STS-B)"


class Correlations(Perplexity):
    """The metrics loss (mean squared error), pearson and spearman, of all predictions at once."""

    best = "pearson"
    direction = "max"

    @torch.no_grad()
    def measure(self, model: nn.Module, held: HeldOut, workers: Workers = SINGLE_PROCESS) -> dict[str, float]:
        """Return the metrics of the class."""
        device = next(model.parameters()).device

        def predictions(batch: Batch) -> list[tuple[float, float]]:
            logits = model(**batch_to_device(batch, device)).logits
            return [*zip(logits.flatten().tolist(), batch["labels"].tolist())]

        batches = share((batch for _, batch in held.batches.epoch(0)), 0, workers.rank, workers.world)
        return correlations(workers.gather([*itertools.chain.from_iterable(map(predictions, batches))]))


class PairRegression(TextTask, config=PairRegressionConfig):
    """Regression of a pair of texts, measured by `Correlations`."""

    config: PairRegressionConfig
    rows: TextPairs

    def __init__(self, config: PairRegressionConfig, tokenizer: Tokenizer):
        rows = TextPairs(config, tokenizer, _number)
        options: dict[str, Any] = {"num_labels": 1, "problem": "regression"}
        super().__init__(
            config,
            tokenizer,
            rows=rows,
            architecture=TextArchitecture(
                "encoder",
                ClassifyConfig(**options),
                tokenizer,
                config.max_length,
                head_options=options,
                tables={"type_vocab_size": rows.token_types},
            ),
            metrics=Correlations(),
        )

    @torch.no_grad()
    def predict(self, model: nn.Module, texts: Sequence[str], pairs: Sequence[str]) -> list[float]:
        """Return the number of each text and its pair."""
        numbers = [0.0] * len(texts)
        rows = [{"text": text, "pair": pair} for text, pair in zip(texts, pairs, strict=True)]
        for places, logits in self.rows.logits(model, rows):
            for place, number in zip(places, logits.flatten().tolist()):
                numbers[place] = number
        return numbers


def correlations(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Return loss, pearson and spearman of (prediction, label), by scipy; 0 for equal numbers on a side."""
    with needs_extra("metrics", "task regress_pair: correlations are computed by scipy"):
        from scipy.stats import pearsonr, spearmanr
    guesses, labels = np.array(pairs, np.float64).reshape(-1, 2).T
    metrics = {"loss": float(((guesses - labels) ** 2).mean()) if len(labels) else 0.0}
    varied = len({*guesses.tolist()}) > 1 and len({*labels.tolist()}) > 1
    for name, function in {"pearson": pearsonr, "spearman": spearmanr}.items():
        metrics[name] = float(function(guesses, labels).statistic) if varied else 0.0
    return metrics


def _number(row: Row) -> float:
    """Return the label of a row as a number; raise `InputError` for text."""
    try:
        number = float(str(row["label"]))
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise InputError(f"label: expected a finite number for each pair of texts, got {quote(row['label'])}")
    return number
