"""Classification: one label for a text, or for two; measured by accuracy and macro F1."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

from polyformer.architecture import ModelConfig
from polyformer.core.errors import InputError, quote
from polyformer.data import Tokenizer
from polyformer.data.batching import Batch, Corrupt, Row
from polyformer.heads import ClassifyConfig
from polyformer.tasks.base import Rows
from polyformer.tasks.joining import Joining
from polyformer.tasks.labels import LabelTask
from polyformer.tasks.text import TextTaskConfig, required, too_long


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassificationConfig(TextTaskConfig):
    """One label for a text."""

    labels: tuple[str, ...] | None = None  # by default those of the training data, sorted
    max_length: int = 512  # tokens of a text, <cls> and <sep> included
    too_long: Literal["refuse", "cut"] = "refuse"  # what is done with a longer text
    token_dropout: float = 0.0  # share of a training text's tokens that <unk> or <mask> replaces

    needs: ClassVar[tuple[str, ...]] = ("text", "label")
    length_option: ClassVar[str] = "max_length"
    shortest: ClassVar[int] = 3
    kind: ClassVar[str] = "classify"
    paper: ClassVar[str] = "Devlin et al. 2019, section 4.1"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.token_dropout < 1:
            raise InputError(f"token_dropout: expected a share in [0, 1), got {self.token_dropout}")
        if self.labels is not None and len(set(self.labels)) < 2:
            raise InputError(
                f"labels: expected two or more different ones, got {', '.join(self.labels) or 'none'}"
            )

    def resolve(self, rows: Rows) -> Self:
        """With the labels of `rows`, sorted; raises `InputError` for fewer than two."""
        if self.labels is not None:
            return self
        labels = {str(row["label"]) for row in rows}
        if len(labels) < 2:
            raise InputError(
                f"labels: every training text has the same one, {quote(labels.pop())}; two or more are needed"
            )
        return dataclasses.replace(self, labels=tuple(sorted(labels)))

    def build(self, tokenizer: Tokenizer) -> "Classification":
        """The task with `tokenizer`."""
        return Classification(self, tokenizer)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairClassificationConfig(ClassificationConfig):
    """One label for two texts, such as whether they mean the same."""

    needs: ClassVar[tuple[str, ...]] = ("text", "pair", "label")
    text_columns: ClassVar[tuple[str, ...]] = ("text", "pair")
    shortest: ClassVar[int] = 6
    kind: ClassVar[str] = "classify_pair"
    paper: ClassVar[str] = "Devlin et al. 2019, section 4.1 (QQP, QNLI)"

    def build(self, tokenizer: Tokenizer) -> "PairClassification":
        """The task with `tokenizer`."""
        return PairClassification(self, tokenizer)


class Classification(LabelTask):
    """Metrics: loss (nats a text), accuracy, f1_macro, the mean over the labels of their F1, and majority,
    the accuracy of always taking the label that is the most frequent in these data.

    A label with no text and no prediction counts as F1 0.
    """

    config: ClassificationConfig
    best = "accuracy"
    direction = "max"
    head_type = ClassifyConfig

    def __init__(self, config: ClassificationConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        self.cut = 0  # texts cut since `encode_rows` was called
        self.sums = 1 + len(self.labels) ** 2
        if config.token_dropout:
            token = tokenizer.mask_id if tokenizer.unk_id is None else tokenizer.unk_id
            self.unknown = required(token, "<unk> or <mask>")

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """<cls> text <sep>, of every text."""
        limit = self.config.max_length
        rows = [[self.cls, *ids, self.sep] for ids in self.tokenizer.encode_batch(texts)]
        for number, ids in enumerate(rows):
            if len(ids) > limit:
                self.count_cut(number, texts[number], len(ids))
                rows[number] = [*ids[: limit - 1], self.sep]
        return rows

    def count_cut(self, number: int, text: str, length: int) -> None:
        """Count a text of too many tokens, which is to be cut; `InputError` where that may not be."""
        if self.config.too_long == "refuse":
            raise too_long(f"text {number + 1} ({quote(text)})", length, self.config.max_length, "cut")
        self.cut += 1

    def encode_rows(self, rows: Sequence[Row]) -> list[Row]:
        """`inputs`, with a note of how many texts were cut."""
        self.cut = 0
        encoded = self.inputs(rows)
        if self.cut:
            self.notes.append(f"{self.cut} of {len(rows)} texts are cut to {self.config.max_length} tokens")
        return encoded

    def inputs(self, rows: Sequence[Row]) -> list[Row]:
        """The token ids of each row."""
        return [{"input_ids": ids} for ids in self.encode([row["text"] for row in rows])]

    def prepare(self, rows: Sequence[Row]) -> list[Row]:
        """The token ids and the label's number of each row."""
        labels = [self.label_id(str(row["label"])) for row in rows]
        return [{**row, "labels": label} for row, label in zip(self.encode_rows(rows), labels)]

    @property
    def corrupt(self) -> Corrupt | None:
        """Replace `token_dropout` of the tokens, all but the special ones, by <unk> or <mask>."""
        share = self.config.token_dropout
        if not share:
            return None

        def drop_tokens(row: Row, generator: np.random.Generator) -> Row:
            ids = np.array(row["input_ids"])
            inside = ids[1:-1]
            inside[(generator.random(len(inside)) < share) & (inside != self.sep)] = self.unknown
            return {**row, "input_ids": ids}

        return drop_tokens

    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        """The summed loss, and the confusion matrix [label, prediction], flat."""
        output, labels = model(**batch), batch["labels"]
        count = len(self.labels)
        confusion = torch.bincount(labels * count + output.logits.argmax(-1), minlength=count**2)
        return torch.cat([(output.loss.double() * len(labels)).unsqueeze(0), confusion.double()])

    def metrics(self, totals: list[float], counts: dict[str, float]) -> dict[str, float]:
        """See the class."""
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

    @torch.no_grad()
    def classify(
        self, model: nn.Module, texts: Sequence[str], pairs: Sequence[str] | None = None
    ) -> list[dict[str, float]]:
        """For every text, or text and its pair, the probability of each label."""
        rows = paired(texts, pairs, wanted="pair" in self.config.needs)
        results: list[dict[str, float]] = [{}] * len(texts)
        for numbers, batch in self.batched(model, self.encode_rows(rows)):
            for number, probabilities in zip(numbers, model(**batch).logits.softmax(-1).tolist()):
                results[number] = dict(zip(self.labels, probabilities))
        return results


class PairClassification(Classification):
    """Two texts in a row, as `Joining` has them."""

    def __init__(self, config: ClassificationConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        self.joining = Joining(tokenizer, self.cls, self.sep, config.max_length)

    def adapt(self, config: ModelConfig) -> ModelConfig:
        """The model with two token types, where the second text has a type of its own."""
        return self.joining.adapt(super().adapt(config))

    def inputs(self, rows: Sequence[Row]) -> list[Row]:
        """The token ids of both texts, joined."""
        texts = [row["text"] for row in rows]

        def cut(number: int, length: int) -> None:
            self.count_cut(number, texts[number], length)

        return self.joining.rows(texts, [row["pair"] for row in rows], cut)


def paired(texts: Sequence[str], pairs: Sequence[str] | None, wanted: bool) -> list[Row]:
    """Rows of {text} or {text, pair}, as the task wants them; `InputError` for the other."""
    if wanted != (pairs is not None):
        expected = (
            "a second text for each, the task's pair" if wanted else "one text, for which it was trained"
        )
        raise InputError(f"pair: expected {expected}, got {'none' if wanted else 'two'}")
    if pairs is None:
        return [{"text": text} for text in texts]
    return [{"text": text, "pair": pair} for text, pair in zip(texts, pairs, strict=True)]
