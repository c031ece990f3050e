"""Labels and numbers of texts, of pairs of texts, and of words.

    kind               predicts, for            measured by
    classify           a label, a text          accuracy, macro F1
    classify_pair      a label, a pair          accuracy, macro F1
    classify_grouped   a label, a pair          also by groups of pairs
    tag                a label, each word       entity F1 (BIO)
    regress_pair       a number, a pair         correlations with the labels

**tag**: a word may have several tokens; only the first token has the label.

**regress_pair**: a number such as the similarity of two texts; the loss is the mean squared error. Cer et al.
2017 (STS-B); Devlin et al. 2019, section 4.1.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

from polyformer.core.errors import InputError, quote
from polyformer.core.host_values import IGNORED, batch_to_device
from polyformer.core.imports import needs_extra
from polyformer.data import Tokenizer
from polyformer.data.rows.batching import Batch, Row
from polyformer.nn.heads import ClassifyConfig, HeadConfig, TagConfig
from polyformer.training import share
from polyformer.training.tasks.base import HeldOut, Rows
from polyformer.training.tasks.evaluation import SINGLE_PROCESS, Workers
from polyformer.training.tasks.labels import (
    LabelMetric,
    LabelTask,
    PairRows,
    SingleLabelTask,
    TextRows,
    TextRowsConfig,
    TokenDropout,
    TokenDropoutConfig,
    check_labels,
    label_metrics,
    labels_of,
)
from polyformer.training.tasks.text import most_likely, stacked, too_long

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


Entity = tuple[str, int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaggingConfig(TokenDropoutConfig):
    """Tagging: assign a label to every word of a text, as for named entities."""

    labels: tuple[str, ...] | None = None  # by default the sorted tags of the training data
    max_length: int = 256  # tokens of a sentence, including <cls> and <sep>
    too_long: Literal["refuse", "drop"] = "refuse"  # handling of longer training sentences

    needs: ClassVar[tuple[str, ...]] = ("tokens", "tags")
    length_option: ClassVar[str] = "max_length"
    shortest: ClassVar[int] = 3
    kind: ClassVar[str] = "tag"
    paper: ClassVar[str] = "Devlin et al. 2019, section 5.3"

    def resolve(self, rows: Rows) -> Self:
        """Return this with the tags of `rows`, sorted."""
        if self.labels is not None:
            return self
        return dataclasses.replace(self, labels=tuple(sorted({tag for row in rows for tag in row["tags"]})))

    def texts(self, rows: Rows) -> Iterator[str]:
        """Return the sentences, with a space between words."""
        return (" ".join(row["tokens"]) for row in rows)


class Tagging(LabelTask, TokenDropout, config=TaggingConfig):
    """Tagging, with metrics: loss (nats per word), accuracy of tags, and precision, recall and entity f1.

    The last three are measured if tags are BIO. An entity is correct if its type, its first and its last word
    are correct.
    """

    config: TaggingConfig
    best = "f1"
    direction = "max"
    sums = 6
    command = "tag"
    head_type = TagConfig

    def __init__(self, config: TaggingConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        # The token for a word without tokens, because its label needs a position.
        self.unknown = self.sep if tokenizer.unk_id is None else tokenizer.unk_id
        self.has_entities = any(tag.startswith(("B-", "I-")) for tag in self.labels)
        if not self.has_entities:
            self.best = "accuracy"  # for parts of speech, f1 would always be 0

    def encode(self, words: Sequence[str]) -> tuple[list[int], list[int]]:
        """Return the token ids of a sentence, and the index of the first token of each word."""
        spaced = [f" {word}" if number else word for number, word in enumerate(words)]
        ids, firsts = [self.cls], []
        for pieces in self.tokenizer.encode_batch(spaced):
            firsts.append(len(ids))
            ids += pieces or [self.unknown]
        return [*ids, self.sep], firsts

    def prepare(self, rows: Sequence[Row]) -> list[Row]:
        """Return sentences of at most `max_length` tokens; longer sentences are dropped or refused."""
        prepared = self.prepare_held_out(rows)
        for number, row in enumerate(prepared):
            if len(row["input_ids"]) > self.config.max_length and self.config.too_long == "refuse":
                name = f"sentence {number + 1} ({quote(' '.join(rows[number]['tokens']))})"
                raise too_long(name, len(row["input_ids"]), self.config.max_length, "drop")
        return [row for row in prepared if len(row["input_ids"]) <= self.config.max_length]

    def prepare_held_out(self, rows: Sequence[Row]) -> list[Row]:
        """Return sentences of any length, with a label at the first token of each word."""
        prepared = []
        for row in rows:
            ids, firsts = self.encode(row["tokens"])
            labels = [IGNORED] * len(ids)
            if len(row["tags"]) != len(firsts):
                raise InputError(
                    f"tags: expected one for each of {len(firsts)} words, got {len(row['tags'])}"
                )
            for first, tag in zip(firsts, row["tags"]):
                labels[first] = self.label_id(tag)
            prepared.append({"input_ids": ids, "labels": labels})
        return prepared

    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the summed loss, words, correct tags, and entities: correct, predicted, actual."""
        output, labels = model(**batch), batch["labels"]
        words, predictions = labels != IGNORED, most_likely(output)
        count = self.weight(batch)
        counts = np.zeros(self.sums - 1)
        for row_labels, row_predictions, here in zip(labels, predictions, words):
            named = ([self.labels[i] for i in row[here].tolist()] for row in (row_labels, row_predictions))
            counts += self.compared(*named)
        return stacked(output.loss.double() * count, *counts.tolist(), device=labels.device)

    @staticmethod
    def compared(tags: Sequence[str], predicted: Sequence[str]) -> tuple[int, ...]:
        """Return the number of words and of correct tags, and of entities: correct, predicted, actual."""
        truth, result = entities(tags), entities(predicted)
        right = sum(tag == other for tag, other in zip(tags, predicted, strict=True))
        return len(tags), right, len(truth & result), len(result), len(truth)

    def metrics(self, totals: list[float], counts: dict[str, float]) -> dict[str, float]:
        """Return the metrics of the class."""
        nats, words, correct_tags, correct, predicted, actual = totals
        metrics = {"loss": nats / max(words, 1), "accuracy": correct_tags / max(words, 1)}
        if not self.has_entities:
            return metrics
        return {
            **metrics,
            "precision": correct / max(predicted, 1),
            "recall": correct / max(actual, 1),
            "f1": 2 * correct / max(predicted + actual, 1),
        }

    @torch.no_grad()
    def tag(self, model: nn.Module, sentences: Sequence[Sequence[str]]) -> list[list[str]]:
        """Return the tag of every word of every sentence."""
        encoded = [self.encode(words) for words in sentences]
        tags: list[list[str]] = [[]] * len(sentences)
        for numbers, batch in self.batched(model, [ids for ids, _ in encoded]):
            predictions = model(**batch).logits.argmax(-1).tolist()
            for number, prediction in zip(numbers, predictions):
                tags[number] = [self.labels[prediction[first]] for first in encoded[number][1]]
        return tags


def entities(tags: Sequence[str]) -> set[Entity]:
    """Return the entities of BIO tags: (type, first word, word after the last).

    An entity continues while tags are I- of its type; an I- without an entity to continue starts a new
    entity, as in the script of CoNLL-2000. A tag that is neither B- nor I- is outside.
    """
    spans: set[Entity] = set()
    kind, start = "", 0
    for index, tag in enumerate([*tags, "O"]):
        sign, _, name = tag.partition("-")
        inside = sign in ("B", "I")
        if kind and not (sign == "I" and name == kind):
            spans.add((kind, start, index))
            kind = ""
        if inside and not kind:
            kind, start = name, index
    return spans


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairRegressionConfig(TextRowsConfig):
    """Regression: assign a number to a pair of texts, such as their similarity."""

    needs: ClassVar[tuple[str, ...]] = ("text", "pair", "label")
    text_columns: ClassVar[tuple[str, ...]] = ("text", "pair")
    shortest: ClassVar[int] = 6
    kind: ClassVar[str] = "regress_pair"
    paper: ClassVar[str] = "Devlin et al. 2019, section 4.1 (STS-B)"


class PairRegression(PairRows, config=PairRegressionConfig):
    """Regression of a pair of texts, with metrics: loss (mean squared error), pearson and spearman."""

    config: PairRegressionConfig
    best = "pearson"
    direction = "max"
    head: HeadConfig = ClassifyConfig(num_labels=1, problem="regression")

    def fit_head(self, head: HeadConfig) -> HeadConfig:
        """Return the model's head with one number, if it classifies texts, else the head of the task."""
        if isinstance(head, ClassifyConfig):
            return dataclasses.replace(head, num_labels=1, problem="regression")
        return self.head

    def prepare(self, rows: Sequence[Row]) -> list[Row]:
        """Return the token ids and the number of each row."""
        numbers = [_number(row["label"]) for row in rows]
        return [{**row, "labels": number} for row, number in zip(self.encode_rows(rows), numbers)]

    @torch.no_grad()
    def measure(self, model: nn.Module, held: HeldOut, workers: Workers = SINGLE_PROCESS) -> dict[str, float]:
        """Return the metrics of the class; they need all predictions at once."""
        device = next(model.parameters()).device

        def predictions(batch: Batch) -> list[tuple[float, float]]:
            logits = model(**batch_to_device(batch, device)).logits
            return [*zip(logits.flatten().tolist(), batch["labels"].tolist())]

        batches = share((batch for _, batch in held.batches.epoch(0)), 0, workers.rank, workers.world)
        return correlations(workers.gather([*itertools.chain.from_iterable(map(predictions, batches))]))

    @torch.no_grad()
    def predict(self, model: nn.Module, texts: Sequence[str], pairs: Sequence[str]) -> list[float]:
        """Return the number of each text and its pair."""
        numbers = [0.0] * len(texts)
        rows = [{"text": text, "pair": pair} for text, pair in zip(texts, pairs, strict=True)]
        for places, logits in self.logits(model, rows):
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


def _number(label: object) -> float:
    """Return a label as a number; raise `InputError` for text."""
    try:
        number = float(str(label))
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise InputError(f"label: expected a finite number for each pair of texts, got {quote(label)}")
    return number
