"""Classification: one label for a text, or for two; measured by accuracy and macro F1."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

from polyformer.architecture import ModelConfig
from polyformer.core.errors import InputError, quote
from polyformer.data import Tokenizer
from polyformer.data.batching import Batch, Corrupt, Row
from polyformer.data.pairs import shares_of_room
from polyformer.heads import ClassifyConfig, HeadConfig
from polyformer.tasks.base import (
    Rows,
    TaskConfig,
    TextTask,
    check_room,
    required,
    too_long,
    unseen,
    with_tables,
)
from polyformer.training.config import at_least


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassificationConfig(TaskConfig):
    """One label for a text."""

    labels: tuple[str, ...] | None = None  # by default those of the training data, sorted
    max_length: int = 512  # tokens of a text, <cls> and <sep> included
    too_long: Literal["refuse", "cut"] = "refuse"  # what is done with a longer text
    token_dropout: float = 0.0  # share of a training text's tokens that are replaced by <unk> or <mask>

    needs: ClassVar[tuple[str, ...]] = ("text", "label")
    kind: ClassVar[str] = "classify"
    paper: ClassVar[str] = "Devlin et al. 2019, section 4.1"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(3, max_length=self.max_length)
        check_room(self.batch_tokens, "max_length", self.max_length)
        if not 0 <= self.token_dropout < 1:
            raise InputError(f"token_dropout: expected a share in [0, 1), got {self.token_dropout}")
        if self.labels is not None and len(set(self.labels)) < 2:
            raise InputError(
                f"labels: expected two or more different ones, got {', '.join(self.labels) or 'none'}"
            )

    def resolve(self, rows: Rows) -> Self:
        if self.labels is not None:
            return self
        labels = {str(row["label"]) for row in rows}
        if len(labels) < 2:
            raise InputError(
                f"labels: every training text has the same one, {quote(labels.pop())}; two or more are needed"
            )
        return dataclasses.replace(self, labels=tuple(sorted(labels)))

    def texts(self, rows: Rows) -> Iterator[str]:
        return (row["text"] for row in rows)

    def build(self, tokenizer: Tokenizer) -> "Classification":
        return Classification(self, tokenizer)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairClassificationConfig(ClassificationConfig):
    """One label for two texts, as whether they say the same."""

    needs: ClassVar[tuple[str, ...]] = ("text", "pair", "label")
    kind: ClassVar[str] = "classify_pair"
    paper: ClassVar[str] = "Devlin et al. 2019, section 4.1 (QQP, QNLI)"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(6, max_length=self.max_length)

    def texts(self, rows: Rows) -> Iterator[str]:
        return (row[name] for row in rows for name in ("text", "pair"))

    def build(self, tokenizer: Tokenizer) -> "PairClassification":
        return PairClassification(self, tokenizer)


class Classification(TextTask):
    """Metrics: loss (nats a text), accuracy, and f1_macro, the mean over the labels of their F1.

    A label with no text and no prediction counts as F1 0.
    """

    best = "accuracy"
    direction = "max"
    stacks = "encoder"

    def __init__(self, config: ClassificationConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        assert config.labels is not None
        self.config, self.labels = config, config.labels
        self.cut = 0
        self.head: HeadConfig = ClassifyConfig(num_labels=len(self.labels))
        self.sums = 1 + len(self.labels) ** 2
        self.cls, self.sep = required(tokenizer.cls_id, "<cls>"), required(tokenizer.sep_id, "<sep>")
        if config.token_dropout:
            number = tokenizer.mask_id if tokenizer.unk_id is None else tokenizer.unk_id
            self.unknown = required(number, "<unk> or <mask>")

    @property
    def positions(self) -> int:
        return self.config.max_length

    def fit_head(self, head: HeadConfig) -> HeadConfig:
        if isinstance(head, ClassifyConfig):
            return dataclasses.replace(head, num_labels=len(self.labels))
        return self.head

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

    def noted(self, rows: Sequence[Row]) -> list[Row]:
        """`inputs`, with a note of how many texts were cut."""
        self.cut = 0
        found = self.inputs(rows)
        if self.cut:
            self.notes.append(f"{self.cut} of {len(rows)} texts are cut to {self.config.max_length} tokens")
        return found

    def inputs(self, rows: Sequence[Row]) -> list[Row]:
        """What the model reads of each row."""
        return [{"input_ids": ids} for ids in self.encode([row["text"] for row in rows])]

    def prepare(self, rows: Sequence[Row]) -> list[Row]:
        numbers = {label: number for number, label in enumerate(self.labels)}
        for row in rows:
            if str(row["label"]) not in numbers:
                raise unseen(str(row["label"]), self.labels)
        encoded = self.noted(rows)
        return [{**one, "labels": numbers[str(row["label"])]} for one, row in zip(encoded, rows)]

    @property
    def corrupt(self) -> Corrupt | None:
        share = self.config.token_dropout
        if not share:
            return None

        def forget(row: Row, generator: np.random.Generator) -> Row:
            ids = np.array(row["input_ids"])
            inside = ids[1:-1]
            inside[(generator.random(len(inside)) < share) & (inside != self.sep)] = self.unknown
            return {**row, "input_ids": ids}

        return forget

    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        output, labels = model(**batch), batch["labels"]
        count = len(self.labels)
        confusion = torch.bincount(labels * count + output.logits.argmax(-1), minlength=count**2)
        return torch.cat([(output.loss.double() * len(labels)).unsqueeze(0), confusion.double()])

    def metrics(self, totals: list[float], counts: dict[str, float]) -> dict[str, float]:
        confusion = np.array(totals[1:]).reshape(len(self.labels), -1)  # [label, prediction]
        right, number = np.diag(confusion), max(confusion.sum(), 1)
        f1 = 2 * right / np.maximum(confusion.sum(0) + confusion.sum(1), 1)
        found = {"loss": totals[0] / number, "accuracy": right.sum() / number, "f1_macro": f1.mean()}
        return {name: float(value) for name, value in found.items()}

    @torch.no_grad()
    def classify(
        self, model: nn.Module, texts: Sequence[str], pairs: Sequence[str] | None = None
    ) -> list[dict[str, float]]:
        """For every text, or text and its pair, the probability of each label."""
        rows = paired(texts, pairs, wanted="pair" in self.config.needs)
        found: list[dict[str, float]] = [{}] * len(texts)
        for chosen, batch in self.batched(model, self.noted(rows)):
            for i, shares in zip(chosen, model(**batch).logits.softmax(-1).tolist()):
                found[i] = dict(zip(self.labels, shares))
        return found


class PairClassification(Classification):
    """<cls> text <sep> pair <sep>, with token types 0 and 1, or as the checkpoint's own tokenizer joins two.

    Of two texts that are too long together, the longer loses its end.
    """

    def __init__(self, config: ClassificationConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        ids, types = tokenizer.encode_for_model("", "")
        marked = len(ids) > 2  # by a checkpoint's tokenizer: RoBERTa puts two </s> between, all of type 0
        self.between = ids[1:-1] if marked else [self.sep]
        self.second = types[-1] if marked else 1

    def adapt(self, config: ModelConfig) -> ModelConfig:
        """The model with a type for the second text, where it has one of its own."""
        config = super().adapt(config)
        return with_tables(config, type_vocab_size=2) if self.second else config

    def inputs(self, rows: Sequence[Row]) -> list[Row]:
        sides = [self.tokenizer.encode_batch([row[name] for row in rows]) for name in ("text", "pair")]
        return [self._joined(number, *one) for number, one in enumerate(zip(rows, *sides))]

    def _joined(self, number: int, row: Row, text: list[int], pair: list[int]) -> Row:
        room = self.config.max_length - 2 - len(self.between)
        if len(text) + len(pair) > room:
            self.count_cut(number, row["text"], len(text) + len(pair) + self.config.max_length - room)
            kept = shares_of_room(len(text), len(pair), room)
            text, pair = text[: kept[0]], pair[: kept[1]]
        first = [self.cls, *text, *self.between]
        types = {"token_type_ids": [0] * len(first) + [1] * (len(pair) + 1)} if self.second else {}
        return {"input_ids": [*first, *pair, self.sep], **types}


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
