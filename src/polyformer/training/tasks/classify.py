"""Classification: assign a label to a text or a pair of texts; measured by accuracy and macro F1."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
import torch
from annotated_types import Interval
from torch import Tensor, nn

from polyformer.core.errors import InputError, quote
from polyformer.data import Tokenizer
from polyformer.data.batching import Corrupt, Row
from polyformer.models.config import ModelConfig
from polyformer.nn.heads import ClassifyConfig
from polyformer.training.tasks.base import Rows
from polyformer.training.tasks.labels import LabelTask, SingleLabelTask, check_labels, labels_of
from polyformer.training.tasks.pair_encoder import PairEncoder
from polyformer.training.tasks.text import TextTaskConfig, required, too_long


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassificationConfig(TextTaskConfig):
    """Text classification: assign a label to a text."""

    labels: tuple[str, ...] | None = None  # by default the sorted labels of the training data
    max_length: int = 512  # tokens of a text, including <cls> and <sep>
    too_long: Literal["refuse", "cut"] = "refuse"  # handling of longer texts
    token_dropout: Annotated[float, Interval(ge=0, lt=1)] = 0.0  # of training tokens become <unk> or <mask>

    needs: ClassVar[tuple[str, ...]] = ("text", "label")
    length_option: ClassVar[str] = "max_length"
    shortest: ClassVar[int] = 3
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


class Classification(SingleLabelTask, LabelTask, config=ClassificationConfig):
    """Classification of a text; `SingleLabelTask` has the metrics."""

    config: ClassificationConfig
    head_type = ClassifyConfig

    def __init__(self, config: ClassificationConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        self.cut = 0  # texts truncated since the last call of `encode_rows`
        if config.token_dropout:
            token = tokenizer.mask_id if tokenizer.unk_id is None else tokenizer.unk_id
            self.unknown = required(token, "<unk> or <mask>")

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

    def prepare(self, rows: Sequence[Row]) -> list[Row]:
        """Return the token ids and the number of the label of each row."""
        labels = [self.label_id(str(row["label"])) for row in rows]
        return [{**row, "labels": label} for row, label in zip(self.encode_rows(rows), labels)]

    @property
    def corrupt(self) -> Corrupt | None:
        """Return a function that replaces `token_dropout` of the text tokens by <unk> or <mask>."""
        share = self.config.token_dropout
        if not share:
            return None

        def drop_tokens(row: Row, generator: np.random.Generator) -> Row:
            ids = np.array(row["input_ids"])
            inside = ids[1:-1]
            inside[(generator.random(len(inside)) < share) & (inside != self.sep)] = self.unknown
            return {**row, "input_ids": ids}

        return drop_tokens

    @torch.no_grad()
    def probabilities(self, model: nn.Module, rows: Sequence[Row]) -> Tensor:
        """Return the probability [rows, labels] of each label of the rows' texts."""
        results = torch.zeros(len(rows), len(self.labels))
        for numbers, batch in self.batched(model, self.encode_rows(rows)):
            results[numbers] = model(**batch).logits.softmax(-1).float().cpu()
        return results

    def classify(
        self, model: nn.Module, texts: Sequence[str], pairs: Sequence[str] | None = None
    ) -> list[dict[str, float]]:
        """Return the probability of each label for every text, or text and its pair."""
        rows = paired(texts, pairs, wanted="pair" in self.config.needs)
        return [dict(zip(self.labels, shares)) for shares in self.probabilities(model, rows).tolist()]


class PairClassification(Classification, config=PairClassificationConfig):
    """Classification of a pair of texts, joined by `PairEncoder`."""

    def __init__(self, config: ClassificationConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        self.joining = PairEncoder(tokenizer, self.cls, self.sep, config.max_length)

    def adapt(self, config: ModelConfig) -> ModelConfig:
        """Return the config with two token types, if the second text has a separate type."""
        return self.joining.adapt(super().adapt(config))

    def inputs(self, rows: Sequence[Row]) -> list[Row]:
        """Return the token ids of both texts, joined."""
        texts = [row["text"] for row in rows]

        def cut(number: int, length: int) -> None:
            self.count_cut(number, texts[number], length)

        return self.joining.rows(texts, [row["pair"] for row in rows], cut)


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
