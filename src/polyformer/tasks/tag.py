"""Tagging: a label for every word, read as named entities (BIO); measured by entity F1.

A word may be several tokens: the first of them carries its label, the others none.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from polyformer.core.errors import InputError, quote
from polyformer.data import Tokenizer
from polyformer.data.batching import Batch, Row
from polyformer.heads import HeadConfig, TagConfig
from polyformer.tasks.base import Rows, TaskConfig, TextTask, check_room, required, too_long, unseen
from polyformer.training.config import at_least

Entity = tuple[str, int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaggingConfig(TaskConfig):
    """A label for every word."""

    labels: tuple[str, ...] | None = None  # by default those of the training data, sorted
    max_length: int = 256  # tokens of a sentence, <cls> and <sep> included
    too_long: Literal["refuse", "drop"] = "refuse"  # what is done with a longer training sentence

    needs: ClassVar[tuple[str, ...]] = ("tokens", "tags")
    kind: ClassVar[str] = "tag"
    paper: ClassVar[str] = "Devlin et al. 2019, section 5.3"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(3, max_length=self.max_length)
        check_room(self.batch_tokens, "max_length", self.max_length)

    def resolve(self, rows: Rows) -> Self:
        if self.labels is not None:
            return self
        return dataclasses.replace(self, labels=tuple(sorted({tag for row in rows for tag in row["tags"]})))

    def texts(self, rows: Rows) -> Iterator[str]:
        return (" ".join(row["tokens"]) for row in rows)

    def build(self, tokenizer: Tokenizer) -> "Tagging":
        return Tagging(self, tokenizer)


class Tagging(TextTask):
    """Metrics: loss (nats a word), accuracy of single tags, and precision, recall and f1 of whole entities.

    An entity counts where its type, its first and its last word are right.
    """

    best = "f1"
    direction = "max"
    stacks = "encoder"
    sums = 6

    def __init__(self, config: TaggingConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        assert config.labels is not None
        self.config, self.labels = config, config.labels
        self.head: HeadConfig = TagConfig(num_labels=len(self.labels))
        self.cls, self.sep = required(tokenizer.cls_id, "<cls>"), required(tokenizer.sep_id, "<sep>")
        # What stands for a word of which the tokenizer keeps nothing: a label needs a place.
        self.nothing = self.sep if tokenizer.unk_id is None else tokenizer.unk_id

    @property
    def positions(self) -> int:
        return self.config.max_length

    def fit_head(self, head: HeadConfig) -> HeadConfig:
        if isinstance(head, TagConfig):
            return dataclasses.replace(head, num_labels=len(self.labels))
        return self.head

    def encode(self, words: Sequence[str]) -> tuple[list[int], list[int]]:
        """The token ids of a sentence, and the place of each word's first token among them."""
        spaced = [f" {word}" if number else word for number, word in enumerate(words)]
        ids, places = [self.cls], []
        for pieces in self.tokenizer.encode_batch(spaced):
            places.append(len(ids))
            ids += pieces or [self.nothing]
        return [*ids, self.sep], places

    def prepare(self, rows: Sequence[Row]) -> list[Row]:
        prepared = self.prepare_held_out(rows)
        for number, row in enumerate(prepared):
            if len(row["input_ids"]) > self.config.max_length and self.config.too_long == "refuse":
                name = f"sentence {number + 1} ({quote(' '.join(rows[number]['tokens']))})"
                raise too_long(name, len(row["input_ids"]), self.config.max_length, "drop")
        return [row for row in prepared if len(row["input_ids"]) <= self.config.max_length]

    def prepare_held_out(self, rows: Sequence[Row]) -> list[Row]:
        numbers = {label: number for number, label in enumerate(self.labels)}
        prepared = []
        for row in rows:
            ids, places = self.encode(row["tokens"])
            labels = [-100] * len(ids)
            if len(row["tags"]) != len(places):
                raise InputError(
                    f"tags: expected one for each of {len(places)} words, got {len(row['tags'])}"
                )
            for place, tag in zip(places, row["tags"]):
                if tag not in numbers:
                    raise unseen(tag, self.labels)
                labels[place] = numbers[tag]
            prepared.append({"input_ids": ids, "labels": labels})
        return prepared

    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        output, labels = model(**batch), batch["labels"]
        words = labels != -100
        tokens, right = self.weight(batch), int((output.logits.argmax(-1) == labels).sum())
        found = [0, 0, 0]
        for truth, guess, here in zip(labels, output.logits.argmax(-1), words):
            true = entities([self.labels[i] for i in truth[here].tolist()])
            guessed = entities([self.labels[i] for i in guess[here].tolist()])
            found = [found[0] + len(true & guessed), found[1] + len(guessed), found[2] + len(true)]
        counts = torch.tensor([tokens, right, *found], dtype=torch.float64, device=labels.device)
        return torch.cat([(output.loss.double() * tokens).unsqueeze(0), counts])

    def metrics(self, totals: list[float], counts: dict[str, float]) -> dict[str, float]:
        nats, words, right, both, guessed, true = totals
        return {
            "loss": nats / max(words, 1),
            "accuracy": right / max(words, 1),
            "precision": both / max(guessed, 1),
            "recall": both / max(true, 1),
            "f1": 2 * both / max(guessed + true, 1),
        }

    @torch.no_grad()
    def tag(self, model: nn.Module, sentences: Sequence[Sequence[str]]) -> list[list[str]]:
        """The tag of every word of every sentence."""
        encoded = [self.encode(words) for words in sentences]
        found: list[list[str]] = [[]] * len(sentences)
        for chosen, batch in self.batched(model, [ids for ids, _ in encoded]):
            guesses = model(**batch).logits.argmax(-1).tolist()
            for i, guess in zip(chosen, guesses):
                found[i] = [self.labels[guess[place]] for place in encoded[i][1]]
        return found


def entities(tags: Sequence[str]) -> set[Entity]:
    """The entities that BIO tags name: (type, first word, word after the last).

    An entity goes on while tags are I- of its type; an I- that continues nothing begins one, as in the
    script of CoNLL-2000. What is neither B- nor I- is outside.
    """
    found: set[Entity] = set()
    kind, start = "", 0
    for place, tag in enumerate([*tags, "O"]):
        sign, _, name = tag.partition("-")
        inside = sign in ("B", "I")
        if kind and not (sign == "I" and name == kind):
            found.add((kind, start, place))
            kind = ""
        if inside and not kind:
            kind, start = name, place
    return found
