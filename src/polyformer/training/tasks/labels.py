"""Shared parts of tasks with labels: their names and metrics, and rows of one text or a pair of texts.

<cls> text <sep>                  a text
<cls> text <sep> pair <sep>       a text and its pair, with token types 0 and 1
"""

import abc
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from annotated_types import Interval
from torch import Tensor, nn

from polyformer.core.errors import InputError, quote
from polyformer.core.imports import needs_extra
from polyformer.data import Tokenizer
from polyformer.data.rows.batching import Batch, Corrupt, Row
from polyformer.data.rows.pairs import shares_of_capacity
from polyformer.nn.heads import ClassifyConfig, HeadConfig, TagConfig
from polyformer.training.tasks.base import Rows, Task
from polyformer.training.tasks.text import EncoderTask, TextTaskConfig, required, too_long

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


class PairEncoder:
    """The row format <cls> text <sep> pair <sep>, with token types 0 and 1.

    The tokenizer of a checkpoint may define another format. A row has at most `limit` tokens: if the two
    texts are too long, the longer text is truncated. token_types: the number of types that the model needs.
    """

    def __init__(self, tokenizer: Tokenizer, cls: int, sep: int, limit: int):
        ids, types = tokenizer.encode_for_model("", "")
        own = len(ids) > 2  # a checkpoint's tokenizer: RoBERTa has two </s> between, all of type 0
        self.between = ids[1:-1] if own else [sep]
        self.token_types = 2 if not own or types[-1] else 0
        self.tokenizer, self.cls, self.sep, self.limit = tokenizer, cls, sep, limit

    def rows(self, texts: Sequence[str], pairs: Sequence[str]) -> tuple[list[Row], dict[int, int]]:
        """Return the token ids of each text and its pair, and the lengths of pairs before truncation."""
        rows, cut, around = list[Row](), dict[int, int](), 2 + len(self.between)
        sides = self.tokenizer.encode_batch(texts), self.tokenizer.encode_batch(pairs)
        for number, (text, pair) in enumerate(zip(*sides)):
            if (length := len(text) + len(pair) + around) > self.limit:
                cut[number] = length
                kept = shares_of_capacity(len(text), len(pair), self.limit - around)
                text, pair = text[: kept[0]], pair[: kept[1]]
            first = [self.cls, *text, *self.between]
            types = {"token_type_ids": [0] * len(first) + [1] * (len(pair) + 1)} if self.token_types else {}
            rows.append({"input_ids": [*first, *pair, self.sep], **types})
        return rows, cut


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenDropoutConfig(TextTaskConfig):
    """Options of tasks that drop tokens of the training texts."""

    token_dropout: Annotated[float, Interval(ge=0, lt=1)] = 0.0  # of training tokens become <unk> or <mask>


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextRowsConfig(TokenDropoutConfig):
    """Options of tasks with rows of a text, or of two texts."""

    max_length: int = 512  # tokens of a text, including <cls> and <sep>
    too_long: Literal["refuse", "cut"] = "refuse"  # handling of longer texts

    length_option: ClassVar[str] = "max_length"
    shortest: ClassVar[int] = 3


class TokenDropout(EncoderTask):
    """A task that replaces some tokens of the training texts, so that a model also learns from the others."""

    config: TokenDropoutConfig

    def __init__(self, config: Any, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        if config.token_dropout:
            token = tokenizer.mask_id if tokenizer.unk_id is None else tokenizer.unk_id
            self.dropped = required(token, "<unk> or <mask>")

    @property
    def corrupt(self) -> Corrupt | None:
        """Return a function that replaces `token_dropout` of the text tokens by <unk> or <mask>."""
        share = self.config.token_dropout
        if not share:
            return None

        def drop_tokens(row: Row, generator: np.random.Generator) -> Row:
            ids = np.array(row["input_ids"])
            inside = ids[1:-1]
            inside[(generator.random(len(inside)) < share) & (inside != self.sep)] = self.dropped
            return {**row, "input_ids": ids}

        return drop_tokens


class TextRows(TokenDropout):
    """A task with rows <cls> text <sep>."""

    config: TextRowsConfig

    def __init__(self, config: Any, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        self.cut = 0  # texts truncated since the last call of `encode_rows`

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return <cls> text <sep> for every text."""
        limit = self.config.max_length
        rows = [[self.cls, *ids, self.sep] for ids in self.tokenizer.encode_batch(texts)]
        for number, ids in enumerate(rows):
            if len(ids) > limit:
                self.count_cut(number, texts[number], len(ids))
                rows[number] = [*ids[: limit - 1], self.sep]
        return rows

    def count_cut(self, number: int, text: str, length: int) -> None:
        """Count a text that has to be truncated; raise `InputError` if truncation is not allowed."""
        if self.config.too_long == "refuse":
            raise too_long(f"text {number + 1} ({quote(text)})", length, self.config.max_length, "cut")
        self.cut += 1

    def encode_rows(self, rows: Sequence[Row]) -> list[Row]:
        """Return `inputs`, and note the number of truncated texts."""
        self.cut = 0
        encoded = self.inputs(rows)
        if self.cut:
            self.notes.append(f"{self.cut} of {len(rows)} texts are cut to {self.config.max_length} tokens")
        return encoded

    def inputs(self, rows: Sequence[Row]) -> list[Row]:
        """Return the token ids of each row."""
        return [{"input_ids": ids} for ids in self.encode([row["text"] for row in rows])]

    @torch.no_grad()
    def logits(self, model: nn.Module, rows: Sequence[Row]) -> Iterator[tuple[list[int], Tensor]]:
        """Yield the numbers of some of the rows and their logits [rows, n]; rows need no label."""
        for numbers, batch in self.batched(model, self.encode_rows(rows)):
            yield numbers, model(**batch).logits.float().cpu()


class PairRows(TextRows):
    """A task with rows of two texts, joined by `PairEncoder`."""

    def __init__(self, config: Any, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        self.joining = PairEncoder(tokenizer, self.cls, self.sep, config.max_length)
        self.token_types = self.joining.token_types

    def inputs(self, rows: Sequence[Row]) -> list[Row]:
        """Return the token ids of both texts, joined."""
        texts = [row["text"] for row in rows]
        joined, cut = self.joining.rows(texts, [row["pair"] for row in rows])
        for number, length in cut.items():
            self.count_cut(number, texts[number], length)
        return joined
