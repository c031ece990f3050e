"""Tagging: a label for each word, as for named entities; measured by entity F1 (BIO).

A word may have several tokens; only the first token has the label. Devlin et al. 2019, section 5.3.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

from polyformer.core.errors import InputError, quote
from polyformer.core.host_values import IGNORED
from polyformer.data import Tokenizer
from polyformer.data.rows.batching import Batch, Row
from polyformer.nn.heads import TagConfig
from polyformer.training.tasks.base import Metrics, Rows, label_count
from polyformer.training.tasks.labels import (
    Labels,
    TokenDropoutConfig,
    token_dropout,
)
from polyformer.training.tasks.text import (
    TextArchitecture,
    TextRows,
    TextTask,
    most_likely,
    row_marks,
    stacked,
    too_long,
)

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


class TaggedWords(TextRows):
    """Rows <cls> words <sep>, with a label at the first token of each word."""

    config: TaggingConfig

    def __init__(self, config: TaggingConfig, tokenizer: Tokenizer, labels: Labels):
        super().__init__(config, tokenizer)
        self.cls, self.sep = row_marks(tokenizer)
        self.corrupt, self.labels = token_dropout(config.token_dropout, tokenizer), labels
        # The token for a word without tokens, because its label needs a position.
        self.unknown = self.sep if tokenizer.unk_id is None else tokenizer.unk_id

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
                labels[first] = self.labels.number(tag)
            prepared.append({"input_ids": ids, "labels": labels})
        return prepared


class Entities(Metrics):
    """The metrics loss (nats per word), accuracy of tags, and precision, recall and f1 of entities.

    The last three are measured if tags are BIO. An entity is correct if its type, its first and its last word
    are correct.
    """

    sums = 6
    direction = "max"

    def __init__(self, labels: tuple[str, ...]):
        self.labels = labels
        self.has_entities = any(tag.startswith(("B-", "I-")) for tag in labels)
        # For parts of speech, f1 would always be 0.
        self.best = "f1" if self.has_entities else "accuracy"

    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the summed loss, words, correct tags, and entities: correct, predicted, actual."""
        output, labels = model(**batch), batch["labels"]
        words, predictions = labels != IGNORED, most_likely(output)
        count = label_count(batch)
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

    def values(self, totals: list[float], counts: dict[str, float]) -> dict[str, float]:
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


class Tagging(TextTask, config=TaggingConfig):
    """Tagging, measured by `Entities`."""

    config: TaggingConfig
    rows: TaggedWords
    metrics: Entities
    command = "tag"

    def __init__(self, config: TaggingConfig, tokenizer: Tokenizer):
        labels = Labels(config.labels)
        self.labels = labels.names
        options: dict[str, Any] = {"num_labels": len(labels)}
        super().__init__(
            config,
            tokenizer,
            rows=TaggedWords(config, tokenizer, labels),
            architecture=TextArchitecture(
                "encoder", TagConfig(**options), tokenizer, config.max_length, head_options=options
            ),
            metrics=Entities(labels.names),
        )

    @torch.no_grad()
    def tag(self, model: nn.Module, sentences: Sequence[Sequence[str]]) -> list[list[str]]:
        """Return the tag of every word of every sentence."""
        encoded = [self.rows.encode(words) for words in sentences]
        tags: list[list[str]] = [[]] * len(sentences)
        for numbers, batch in self.rows.batched(model, [ids for ids, _ in encoded]):
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
