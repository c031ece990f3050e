"""Multiple choice: select the choice that fits a text; measured by accuracy.

Each choice is joined to the text in a separate row, <cls> text <sep> choice <sep>, and gets one score; the
loss is the cross-entropy over the scores of one question. Radford et al. 2018, section 3.3; Devlin et al.
2019, section 4.4 (SWAG).
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from polyformer.core.errors import InputError, quote
from polyformer.data import Collate, Tokenizer
from polyformer.data.formats.columns import right_choice
from polyformer.data.rows.batching import Batch, Row
from polyformer.nn.heads import ChooseConfig, HeadConfig
from polyformer.training.tasks.base import Rows
from polyformer.training.tasks.metrics import prediction_totals
from polyformer.training.tasks.pair_encoder import PairEncoder
from polyformer.training.tasks.text import EncoderTask, TextTaskConfig, batched, too_long


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultipleChoiceConfig(TextTaskConfig):
    """Multiple choice: choose one of several texts, such as the answers to a question."""

    max_length: int = 512  # tokens of a text with a choice, including special tokens
    too_long: Literal["refuse", "cut"] = "refuse"  # handling of longer texts
    first_number: int = 0  # the number of the first choice if labels are numbers

    needs: ClassVar[tuple[str, ...]] = ("text", "choices", "label")
    length_option: ClassVar[str] = "max_length"
    shortest: ClassVar[int] = 6
    kind: ClassVar[str] = "choose"
    paper: ClassVar[str] = "Devlin et al. 2019, section 4.4"

    def texts(self, rows: Rows) -> Iterator[str]:
        """Yield texts and their choices."""
        for row in rows:
            yield row["text"]
            yield from row["choices"]


class MultipleChoice(EncoderTask, config=MultipleChoiceConfig):
    """Multiple choice, with metrics: loss (nats per question), accuracy, and majority.

    majority is the accuracy of always selecting the most frequent position of the right choice in these data.
    """

    config: MultipleChoiceConfig
    best = "accuracy"
    direction = "max"
    head: HeadConfig = ChooseConfig()
    command = "choose"
    sums = 3

    def __init__(self, config: MultipleChoiceConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        self.collate = CollateChoices(self.collate.pad_id)
        self.joining = PairEncoder(tokenizer, self.cls, self.sep, config.max_length)
        self.token_types = self.joining.token_types

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> list[Row]:
        """Return questions with their choices, `pack_choices`, and note the number of truncated rows."""
        texts = [row["text"] for row in rows for _ in row["choices"]]
        choices = [choice for row in rows for choice in row["choices"]]
        joined, cut = self.joining.rows(texts, choices)
        limit = self.config.max_length
        if cut and self.config.too_long == "refuse":
            number = min(cut)
            name = f"text {quote(texts[number])} with its choice {quote(choices[number])}"
            raise too_long(name, cut[number], limit, "cut")
        if cut:
            self.notes.append(
                f"{len(cut)} of {len(texts)} choices with their texts are cut to {limit} tokens"
            )
        each = iter(joined)
        return [pack_choices([next(each) for _ in row["choices"]], self.collate.pad_id) for row in rows]

    def prepare(self, rows: Sequence[Row]) -> list[Row]:
        """Return every question with its choices and the position of the right choice."""
        prepared = self.prepare_held_out(rows)
        for row, question in zip(rows, prepared):
            if (size := len(question["input_ids"])) > self.batch_tokens:
                raise InputError(
                    f"text {quote(row['text'])} with its {len(row['choices'])} choices has {size} tokens, "
                    f"more than task.batch_tokens {self.batch_tokens}; raise it, or lower task.max_length"
                )
        return prepared

    def prepare_held_out(self, rows: Sequence[Row]) -> list[Row]:
        """Return the same; a question larger than a training batch is measured in a separate batch."""
        places = self._places(rows)
        return [{**row, "labels": place} for row, place in zip(self.encode(rows), places)]

    def _places(self, rows: Sequence[Row]) -> list[int]:
        return [right_choice(row["label"], row["choices"], self.config.first_number) for row in rows]

    def count(self, rows: Sequence[Row]) -> dict[str, float]:
        """Return the frequency of the most frequent position."""
        places = Counter(self._places(rows))
        return {"majority": max(places.values(), default=0) / max(len(rows), 1)}

    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the summed loss, the number of correct answers, and of questions."""
        return prediction_totals(model(**batch), batch["labels"])

    def metrics(self, totals: list[float], counts: dict[str, float]) -> dict[str, float]:
        """Return the metrics of the class."""
        nats, correct, number = totals
        return {"loss": nats / max(number, 1), "accuracy": correct / max(number, 1), **counts}

    def choose(self, model: nn.Module, questions: Sequence[Mapping[str, Any]]) -> list[list[float]]:
        """Return the probability of each choice for every {text, choices}."""
        return choice_probabilities(model, self.encode(questions), self.collate.pad_id, self.batch_tokens)


class CollateChoices(Collate):
    """Collation of `pack_choices` questions to one batch of tensors [B, C, T].

    Missing choices of a question are padding, which the head ignores.
    """

    def __call__(self, rows: Sequence[Row]) -> Batch:
        """Return the batch, with labels [B] if the rows have them."""
        shape = len(rows), max(row["choices"] for row in rows), max(map(_length, rows))
        batch = {}
        for name in rows[0].keys() - {"choices", "labels"}:
            stacked = np.full(shape, self.pad_id if name == "input_ids" else 0, np.int64)
            for target, row in zip(stacked, rows):
                target[: row["choices"], : _length(row)] = np.reshape(row[name], (row["choices"], -1))
            batch[name] = torch.from_numpy(stacked)
        if "labels" in rows[0]:
            batch["labels"] = torch.tensor([row["labels"] for row in rows])
        return batch


def pack_choices(rows: Sequence[Row], pad_id: int) -> Row:
    """Pad the rows of a question's choices to one length and concatenate them, with mask and number.

    The length of such a row is the number of tokens that it uses in a batch.
    """
    batch = Collate(pad_id)(rows)
    return {**{name: tensor.flatten().tolist() for name, tensor in batch.items()}, "choices": len(rows)}


@torch.no_grad()
def choice_probabilities(
    model: nn.Module, questions: Sequence[Row], pad_id: int, max_tokens: int
) -> list[list[float]]:
    """Return the probability of each choice of every question; questions are `pack_choices`."""
    shares: list[list[float]] = [[]] * len(questions)
    for numbers, batch in batched(model, questions, CollateChoices(pad_id), max_tokens):
        for number, values in zip(numbers, model(**batch).logits.softmax(-1).tolist()):
            shares[number] = values[: questions[number]["choices"]]
    return shares


def _length(row: Row) -> int:
    """Return the tokens of each choice of a packed row."""
    return len(row["input_ids"]) // row["choices"]
