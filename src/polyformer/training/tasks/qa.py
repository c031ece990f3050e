"""Question answering: find the answer to a question in a text; measured by exact match and F1.

A long text is read in overlapping windows (see `data.rows.answers`); in a window without the answer,
the labels of both ends are <cls>. The answer is the best span of all windows. Devlin et al. 2019, sections
4.2 (SQuAD 1.1) and 4.3 (SQuAD 2.0, unanswerable questions).
"""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from polyformer.core.errors import InputError, quote
from polyformer.core.ranges import PositiveInt
from polyformer.data import Collate
from polyformer.data.formats.questions_and_summaries import exact_match, f1
from polyformer.data.rows.answers import (
    Offsets,
    Window,
    answer_text,
    answer_tokens,
    best_span,
    encode_with_offsets,
    windows,
)
from polyformer.data.rows.batching import Batch, Row
from polyformer.nn.heads import HeadConfig, SpanConfig
from polyformer.training.tasks.base import SINGLE_PROCESS, Rows, Workers
from polyformer.training.tasks.metrics import stacked
from polyformer.training.tasks.text import EncoderTask, TextTaskConfig, batched


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


class QuestionAnswering(EncoderTask, config=QuestionAnsweringConfig):
    """Extractive question answering, with metrics: loss (nats per end of an answer) and accuracy.

    accuracy is the fraction of windows with both ends correct; `finish` adds exact_match and f1 of the
    answers, in percent as in SQuAD's script.
    """

    config: QuestionAnsweringConfig
    command = "answer"
    sums, token_types = 4, 2
    head: HeadConfig = SpanConfig()

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

    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the summed loss, ends of answers, correct windows, windows."""
        output, labels = model(**batch), batch["labels"]
        ends = labels.numel()
        correct = (output.logits.argmax(1) == labels).all(-1).sum()
        return stacked(output.loss.double() * ends, ends, correct, len(labels), device=labels.device)

    def metrics(self, totals: list[float], counts: dict[str, float]) -> dict[str, float]:
        """Return loss and accuracy."""
        nats, ends, correct, count = totals
        return {"loss": nats / max(ends, 1), "accuracy": correct / max(count, 1)}

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
        return answers(model, rows, self.encode(rows), self.config, self.collate)


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
