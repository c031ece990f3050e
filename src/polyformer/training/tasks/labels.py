"""Parts of tasks with labels: their names and metrics, and rows of one text or a pair of texts.

<cls> text <sep>                  a text
<cls> text <sep> pair <sep>       a text and its pair, with token types 0 and 1
"""

import abc
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from annotated_types import Interval
from torch import Tensor, nn

from polyformer.core.errors import InputError, quote
from polyformer.core.imports import needs_extra
from polyformer.data import Tokenizer
from polyformer.data.rows import Batch, Corrupt, Row
from polyformer.data.rows.structured import shares_of_capacity
from polyformer.training.tasks.base import Metrics, Rows, Task
from polyformer.training.tasks.text import TextRows, TextTaskConfig, required, row_marks, too_long

LabelMetric = Literal["f1", "matthews"]


def check_labels(labels: Sequence[str] | None) -> None:
    """Raise `InputError` for fewer than two different labels; None means not yet known."""
    if labels is not None and len(set(labels)) < 2:
        raise InputError(f"labels: expected two or more different ones, got {', '.join(labels) or 'none'}")


def labels_of(rows: Rows, what: str, *ways: str) -> tuple[str, ...]:
    """Return the labels of the training `rows`, sorted.

    Raises `InputError` for fewer than two labels, and for labels that differ only in case. The
    first message names `what` a row is, and ends with the `ways` out.
    """
    labels = {str(row["label"]) for row in rows}
    if len(labels) < 2:
        problem = f"labels: every training {what} has the same one, {quote(labels.pop())}"
        raise InputError("; ".join([problem, "two or more are needed", *ways]))
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


class Labels:
    """The names of labels and their numbers; `InputError` for None, names that are not yet known."""

    def __init__(self, names: tuple[str, ...] | None):
        if names is None:
            raise InputError("labels: not known before the training data are; call resolve(rows)")
        self.names = names
        self._ids = {name: number for number, name in enumerate(names)}

    def __len__(self) -> int:
        return len(self.names)

    def number(self, label: str) -> int:
        """Return the number of a label; raise `InputError` for a label that is not in the training data."""
        if label not in self._ids:
            names = f"{', '.join(map(repr, self.names)):.200}"
            raise InputError(
                f"label: {quote(label)} was not seen in training, which had {names}; correct its rows or "
                "leave them out"
            )
        return self._ids[label]

    def number_of_row(self, row: Row) -> int:
        """Return the number of the label of a row."""
        return self.number(str(row["label"]))


class Confusion(Metrics):
    """The metrics of a label per row, from the matrix of labels and predictions.

    They are loss (nats per row), accuracy, f1_macro, the mean F1 over the labels, and majority, the accuracy
    of always predicting the most frequent label in these data; `more` adds those of `label_metrics`. A label
    without rows and predictions counts as F1 0.
    """

    best = "accuracy"
    direction = "max"

    def __init__(self, labels: Labels, more: Sequence[LabelMetric] = ()):
        self.labels, self.more = labels, more
        self.sums = 1 + len(labels) ** 2

    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the summed loss, and the flattened confusion matrix [label, prediction]."""
        output, labels = model(**batch), batch["labels"]
        count = len(self.labels)
        confusion = torch.bincount(labels * count + output.logits.argmax(-1), minlength=count**2)
        return torch.cat([(output.loss.double() * len(labels)).unsqueeze(0), confusion.double()])

    def values(self, totals: list[float], counts: dict[str, float]) -> dict[str, float]:
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
        plain = {name: float(value) for name, value in metrics.items()}
        return {**plain, **label_metrics(self.more, totals[1:], self.labels.names)}


class SingleLabelTask(Task, abc.ABC):
    """A task that predicts one label per row, measured by `Confusion`."""

    calibrates = True
    labels: tuple[str, ...]

    @abc.abstractmethod
    def probabilities(self, model: nn.Module, rows: Sequence[Any]) -> Tensor:
        """Return the probability [rows, labels] of each label; rows need no label."""


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


def token_dropout(share: float, tokenizer: Tokenizer) -> Corrupt | None:
    """Return a function that replaces `share` of the tokens of a text by <unk> or <mask>; None for 0.

    A model then learns from the other tokens too. Special tokens stay.
    """
    if not share:
        return None
    token = tokenizer.mask_id if tokenizer.unk_id is None else tokenizer.unk_id
    dropped, (_, sep) = required(token, "<unk> or <mask>"), row_marks(tokenizer)

    def drop_tokens(row: Row, generator: np.random.Generator) -> Row:
        ids = np.array(row["input_ids"])
        inside = ids[1:-1]
        inside[(generator.random(len(inside)) < share) & (inside != sep)] = dropped
        return {**row, "input_ids": ids}

    return drop_tokens


class SingleTexts(TextRows):
    """Rows <cls> text <sep>, labelled by `target` of a row."""

    config: TextRowsConfig

    def __init__(self, config: TextRowsConfig, tokenizer: Tokenizer, target: Callable[[Row], Any]):
        super().__init__(config, tokenizer)
        self.cls, self.sep = row_marks(tokenizer)
        self.corrupt, self.target = token_dropout(config.token_dropout, tokenizer), target
        self.token_types = 0  # that the model needs
        self.cut = 0  # texts truncated since the last call of `encode_rows`

    def prepare(self, rows: Sequence[Row]) -> list[Row]:
        """Return the token ids and the target of each row."""
        targets = [self.target(row) for row in rows]
        return [{**row, "labels": target} for row, target in zip(self.encode_rows(rows), targets)]

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


class TextPairs(SingleTexts):
    """Rows of two texts, joined by `PairEncoder`."""

    def __init__(self, config: TextRowsConfig, tokenizer: Tokenizer, target: Callable[[Row], Any]):
        super().__init__(config, tokenizer, target)
        self.joining = PairEncoder(tokenizer, self.cls, self.sep, config.max_length)
        self.token_types = self.joining.token_types

    def inputs(self, rows: Sequence[Row]) -> list[Row]:
        """Return the token ids of both texts, joined."""
        texts = [row["text"] for row in rows]
        joined, cut = self.joining.rows(texts, [row["pair"] for row in rows])
        for number, length in cut.items():
            self.count_cut(number, texts[number], length)
        return joined
