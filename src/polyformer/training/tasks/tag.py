"""Tagging: assign a label to every word, interpreted as named entities (BIO); measured by entity F1.

A word may have several tokens: only the first token has the label.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

from polyformer.core.errors import InputError, quote
from polyformer.core.host_values import IGNORED
from polyformer.data import Tokenizer
from polyformer.data.rows.batching import Batch, Row
from polyformer.nn.heads import TagConfig
from polyformer.training.tasks.base import Rows
from polyformer.training.tasks.labels import LabelTask
from polyformer.training.tasks.metrics import most_likely, stacked
from polyformer.training.tasks.text import too_long
from polyformer.training.tasks.text_rows import TokenDropout, TokenDropoutConfig

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
