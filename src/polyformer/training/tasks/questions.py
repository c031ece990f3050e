"""Questions: find the answer in a text, or choose among texts.

    kind     row                                 label
    qa       <cls> question <sep> text <sep>     the first and the last token of the answer
    choose   <cls> text <sep> choice <sep>       the right choice, by a softmax over the scores of the choices

**qa**: measured by exact match and F1. Long texts are read in overlapping windows (`data.rows.structured`);
in a window without the answer, the labels of both ends are <cls>. The answer is the best span of all windows.
Devlin et al. 2019, sections 4.2 (SQuAD 1.1) and 4.3 (SQuAD 2.0, unanswerable questions).

**choose**: measured by accuracy. Each choice is joined to the text in a separate row, and gets one score; the
loss is the cross-entropy over the scores of one question. Radford et al. 2018, section 3.3; Devlin et al.
2019, section 4.4 (SWAG).
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from polyformer.core.errors import InputError, quote
from polyformer.core.ranges import PositiveInt
from polyformer.data import Collate, Tokenizer
from polyformer.data.formats.columns import right_choice
from polyformer.data.formats.published import exact_match, f1
from polyformer.data.rows import Batch, Row
from polyformer.data.rows.structured import (
    Offsets,
    Window,
    answer_text,
    answer_tokens,
    best_span,
    encode_with_offsets,
    windows,
)
from polyformer.nn.heads import ChooseConfig, SpanConfig
from polyformer.training.task import SINGLE_PROCESS, Workers
from polyformer.training.tasks.base import Metrics, Rows
from polyformer.training.tasks.labels import PairEncoder
from polyformer.training.tasks.text import (
    TextArchitecture,
    TextRows,
    TextTask,
    TextTaskConfig,
    batched,
    prediction_totals,
    row_marks,
    stacked,
    too_long,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuestionAnsweringConfig(TextTaskConfig):
    """Question answering: find the answer to a question in a text."""

    max_length: int = 384  # tokens of a window, including the question and special tokens
    stride: PositiveInt = 128  # tokens between the starts of consecutive windows
    max_question: PositiveInt = 64  # tokens of a question; longer questions are truncated
    max_answer: PositiveInt = 30  # tokens of a predicted answer
    unanswerable: bool = False  # whether there are questions without an answer
    threshold: float = 0.0  # "no answer" is predicted if its score exceeds the best span's by more than this

    needs: ClassVar[tuple[str, ...]] = ("question", "context", "answers")
    length_option: ClassVar[str] = "max_length"
    shortest: ClassVar[int] = 5
    kind: ClassVar[str] = "qa"
    paper: ClassVar[str] = "Devlin et al. 2019, section 4.2"

    def __post_init__(self) -> None:
        super().__post_init__()
        capacity = self.max_length - self.max_question - 3
        if self.stride > capacity:
            raise InputError(
                f"stride: expected at most {capacity}, the tokens of a text that fit next to a question "
                f"(max_length - max_question - 3), got {self.stride}"
            )

    def texts(self, rows: Rows) -> Iterator[str]:
        """Yield questions, and every context once for consecutive questions."""
        last = None
        for row in rows:
            yield row["question"]
            if row["context"] != last:
                last = row["context"]
                yield last


class QuestionWindows(TextRows):
    """Rows of the windows of a context next to their question, labelled by the ends of the answer."""

    config: QuestionAnsweringConfig

    def __init__(self, config: QuestionAnsweringConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        self.cls, self.sep = row_marks(tokenizer)

    def encode(self, rows: Sequence[Row]) -> list[tuple[list[Window], Offsets]]:
        """Return the windows of every context, and the character offsets of its tokens."""
        config = self.config
        questions = self.tokenizer.encode_batch([row["question"] for row in rows])
        contexts = encode_with_offsets(self.tokenizer, [row["context"] for row in rows])
        cut = partial(
            windows, cls_id=self.cls, sep_id=self.sep, length=config.max_length, stride=config.stride
        )
        return [
            (cut(question[: config.max_question], ids), offsets)
            for question, (ids, offsets) in zip(questions, contexts)
        ]

    def prepare(self, rows: Sequence[Row]) -> list[Row]:
        """Return a row per window; its labels are the indices of the answer's first and last token."""
        prepared: list[Row] = []
        for row, (row_windows, offsets) in zip(rows, self.encode(rows)):
            span = self._span(row, offsets)
            prepared += [
                {**_input(window), "labels": np.array(window.labels(span))} for window in row_windows
            ]
        return prepared

    def _span(self, row: Row, offsets: Offsets) -> tuple[int, int] | None:
        """Return the first and last token of the first answer; None without an answer."""
        answers = row["answers"]
        if not answers["text"]:
            if self.config.unanswerable:
                return None
            raise InputError(
                f"answers: {quote(row['question'])} has none; set task.unanswerable if that is intended "
                "(--task.unanswerable true)"
            )
        start, text = answers["answer_start"][0], answers["text"][0]
        stop = start + len(text)
        if row["context"][start:stop] != text:
            raise InputError(
                f"answers: expected {quote(text)} at character {start} of the context, "
                f"got {quote(row['context'][start:stop])}"
            )
        return answer_tokens(offsets, start, stop)


class AnswerEnds(Metrics):
    """The metrics loss (nats per end of an answer) and accuracy, of windows with both ends correct."""

    sums = 4

    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the summed loss, ends of answers, correct windows, windows."""
        output, labels = model(**batch), batch["labels"]
        ends = labels.numel()
        correct = (output.logits.argmax(1) == labels).all(-1).sum()
        return stacked(output.loss.double() * ends, ends, correct, len(labels), device=labels.device)

    def values(self, totals: list[float], counts: dict[str, float]) -> dict[str, float]:
        """Return loss and accuracy."""
        nats, ends, correct, count = totals
        return {"loss": nats / max(ends, 1), "accuracy": correct / max(count, 1)}


class QuestionAnswering(TextTask, config=QuestionAnsweringConfig):
    """Extractive question answering, measured by `AnswerEnds`.

    `finish` adds exact_match and f1 of the answers, in percent as in SQuAD's script.
    """

    config: QuestionAnsweringConfig
    rows: QuestionWindows
    command = "answer"

    def __init__(self, config: QuestionAnsweringConfig, tokenizer: Tokenizer):
        super().__init__(
            config,
            tokenizer,
            rows=QuestionWindows(config, tokenizer),
            architecture=TextArchitecture(
                "encoder", SpanConfig(), tokenizer, config.max_length, tables={"type_vocab_size": 2}
            ),
            metrics=AnswerEnds(),
        )

    def finish(self, model: nn.Module, rows: Rows, workers: Workers = SINGLE_PROCESS) -> dict[str, float]:
        """Return exact_match and f1, means over the questions."""
        questions = list(rows)
        pairs = [
            *zip(
                workers.each(partial(self.answer, model), questions),
                (row["answers"]["text"] for row in questions),
            )
        ]
        scores = {"exact_match": exact_match, "f1": f1}
        return {
            name: 100 * float(np.mean([score(answer, truths) for answer, truths in pairs]))
            for name, score in scores.items()
        }

    def answer(self, model: nn.Module, rows: Sequence[Row]) -> list[str]:
        """Return the answer to the question of each row, a span of its context; empty without an answer."""
        return answers(model, rows, self.rows.encode(rows), self.config, self.rows.collate)


@torch.no_grad()
def answers(
    model: nn.Module,
    rows: Sequence[Row],
    encoded: Sequence[tuple[list[Window], Offsets]],
    config: QuestionAnsweringConfig,
    collate: Collate,
) -> list[str]:
    """Return `QuestionAnswering.answer` for questions that are already encoded."""
    owners = [(number, window) for number, (row_windows, _) in enumerate(encoded) for window in row_windows]
    best: list[tuple[float, str]] = [(-np.inf, "")] * len(rows)
    none = np.full(len(rows), np.inf)  # the score of no answer: the minimum over all windows
    inputs = [_input(window) for _, window in owners]
    for indices, batch in batched(model, inputs, collate, config.batch_tokens):
        for index, logits in zip(indices, model(**batch).logits.double().cpu().numpy()):
            number, window = owners[index]
            text = logits[window.place : window.place + window.size]
            none[number] = min(none[number], float(logits[0].sum()))
            if not len(text):
                continue
            first, last, score = best_span(text[:, 0], text[:, 1], config.max_answer)
            if score > best[number][0]:
                span = first + window.first, last + window.first
                best[number] = score, answer_text(rows[number]["context"], encoded[number][1], *span)
    if not config.unanswerable:
        return [text for _, text in best]
    limit = config.threshold
    return ["" if none[number] - score > limit else text for number, (score, text) in enumerate(best)]


def _input(window: Window) -> Row:
    types = {"token_type_ids": window.token_type_ids} if window.token_type_ids else {}
    return {"input_ids": window.input_ids, **types}


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


class QuestionsWithChoices(TextRows):
    """Rows of a question: each choice joined to the text, and the position of the right choice."""

    config: MultipleChoiceConfig

    def __init__(self, config: MultipleChoiceConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        self.collate = CollateChoices(self.collate.pad_id)
        self.joining = PairEncoder(tokenizer, *row_marks(tokenizer), config.max_length)

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


class RightChoices(Metrics):
    """The metrics loss (nats per question), accuracy, and majority.

    majority is the accuracy of always selecting the most frequent position of the right choice in these data.
    """

    best = "accuracy"
    direction = "max"
    sums = 3

    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the summed loss, the number of correct answers, and of questions."""
        return prediction_totals(model(**batch), batch["labels"])

    def values(self, totals: list[float], counts: dict[str, float]) -> dict[str, float]:
        """Return the metrics of the class."""
        nats, correct, number = totals
        return {"loss": nats / max(number, 1), "accuracy": correct / max(number, 1), **counts}


class MultipleChoice(TextTask, config=MultipleChoiceConfig):
    """Multiple choice, measured by `RightChoices`."""

    config: MultipleChoiceConfig
    rows: QuestionsWithChoices
    command = "choose"

    def __init__(self, config: MultipleChoiceConfig, tokenizer: Tokenizer):
        rows = QuestionsWithChoices(config, tokenizer)
        types = {"type_vocab_size": rows.joining.token_types}
        super().__init__(
            config,
            tokenizer,
            rows=rows,
            architecture=TextArchitecture(
                "encoder", ChooseConfig(), tokenizer, config.max_length, tables=types
            ),
            metrics=RightChoices(),
        )

    def choose(self, model: nn.Module, questions: Sequence[Mapping[str, Any]]) -> list[list[float]]:
        """Return the probability of each choice for every {text, choices}."""
        encoded = self.rows.encode(questions)
        return choice_probabilities(model, encoded, self.rows.collate.pad_id, self.batch_tokens)


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
