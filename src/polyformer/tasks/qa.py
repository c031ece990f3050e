"""Question answering: find the answer to a question in a text; measured by exact match and F1.

A long text is read in overlapping windows (see `polyformer.data.answers`); where a window does not hold the
answer, both its ends stand on <cls>. The answer is the best span of all windows. Devlin et al. 2019, sections
4.2 (SQuAD 1.1) and 4.3 (SQuAD 2.0, unanswerable questions).
"""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from polyformer.architecture import ModelConfig
from polyformer.core.errors import InputError, quote
from polyformer.data import Batches, Collate, Tokenizer, by_tokens
from polyformer.data.answers import (
    Offsets,
    Window,
    answer_text,
    answer_tokens,
    best_span,
    encode_with_offsets,
    windows,
)
from polyformer.data.batching import Batch, Row
from polyformer.data.squad import exact_match, f1
from polyformer.heads import HeadConfig, SpanConfig
from polyformer.tasks.base import Rows, TaskConfig, TextTask, check_room, required, with_tables
from polyformer.training.config import at_least


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnsweringConfig(TaskConfig):
    """Find the answer to a question in a text."""

    max_length: int = 384  # tokens of a window, with the question and its marks
    stride: int = 128  # tokens from the beginning of a window to that of the next
    max_question: int = 64  # tokens of a question; a longer one loses its end
    max_answer: int = 30  # tokens of an answer that is given
    unanswerable: bool = False  # whether there are questions without an answer
    threshold: float = 0.0  # by how much "no answer" must be better than the best span

    needs: ClassVar[tuple[str, ...]] = ("question", "context", "answers")
    kind: ClassVar[str] = "qa"
    paper: ClassVar[str] = "Devlin et al. 2019, section 4.2"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, max_question=self.max_question, max_answer=self.max_answer, stride=self.stride)
        room = self.max_length - self.max_question - 3
        if self.stride > room:
            raise InputError(
                f"stride: expected at most {room}, what of a text fits beside a question "
                f"(max_length - max_question - 3), got {self.stride}"
            )
        check_room(self.batch_tokens, "max_length", self.max_length)

    def texts(self, rows: Rows) -> Iterator[str]:
        """Questions, and every context once as long as its questions follow one another."""
        last = None
        for row in rows:
            yield row["question"]
            if row["context"] != last:
                last = row["context"]
                yield last

    def build(self, tokenizer: Tokenizer) -> "Answering":
        return Answering(self, tokenizer)


class Answering(TextTask):
    """Metrics: loss (nats an end of an answer) and accuracy, windows with both ends right; `finish` adds
    exact_match and f1 of the answers, in percent as SQuAD's script has them.
    """

    stacks = "encoder"
    sums = 4
    head: HeadConfig = SpanConfig()

    def __init__(self, config: AnsweringConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        self.config = config
        self.cls, self.sep = required(tokenizer.cls_id, "<cls>"), required(tokenizer.sep_id, "<sep>")

    @property
    def positions(self) -> int:
        return self.config.max_length

    def adapt(self, config: ModelConfig) -> ModelConfig:
        """The model with two token types, and more where it has them."""
        return with_tables(super().adapt(config), type_vocab_size=2)

    def encode(self, rows: Sequence[Row]) -> list[tuple[list[Window], Offsets]]:
        """The windows of every question's text, and the characters of the text's tokens."""
        config = self.config
        questions = self.tokenizer.encode_batch([row["question"] for row in rows])
        contexts = encode_with_offsets(self.tokenizer, [row["context"] for row in rows])
        marks = {"cls_id": self.cls, "sep_id": self.sep}
        return [
            (
                windows(
                    question[: config.max_question],
                    ids,
                    length=config.max_length,
                    stride=config.stride,
                    **marks,
                ),
                offsets,
            )
            for question, (ids, offsets) in zip(questions, contexts)
        ]

    def prepare(self, rows: Sequence[Row]) -> list[Row]:
        prepared: list[Row] = []
        for row, (found, offsets) in zip(rows, self.encode(rows)):
            span = self._span(row, offsets)
            prepared += [{**_input(one), "labels": np.array(one.labels(span))} for one in found]
        return prepared

    def _span(self, row: Row, offsets: Offsets) -> tuple[int, int] | None:
        """The tokens of the first answer that was given; None where there is no answer."""
        answers = row["answers"]
        if not answers["text"]:
            if self.config.unanswerable:
                return None
            raise InputError(
                f"answers: {quote(row['question'])} has none; set task.unanswerable where that is meant"
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
        output, labels = model(**batch), batch["labels"]
        right = (output.logits.argmax(1) == labels).all(-1).sum()
        ends, count = labels.numel(), len(labels)
        numbers = [output.loss.double() * ends, ends, right, count]
        return torch.stack(
            [torch.as_tensor(one, dtype=torch.float64, device=labels.device) for one in numbers]
        )

    def metrics(self, totals: list[float], counts: dict[str, float]) -> dict[str, float]:
        nats, ends, right, count = totals
        return {"loss": nats / max(ends, 1), "accuracy": right / max(count, 1)}

    def finish(self, model: nn.Module, rows: Rows) -> dict[str, float]:
        kept = list(rows)
        answers = self.answer(model, kept)
        truths = [row["answers"]["text"] for row in kept]
        scores = {"exact_match": exact_match, "f1": f1}
        return {
            name: 100 * float(np.mean([one(*pair) for pair in zip(answers, truths)]))
            for name, one in scores.items()
        }

    def answer(self, model: nn.Module, rows: Sequence[Row]) -> list[str]:
        """The answer to each row's question, a piece of its context; empty where there is none."""
        return answers(model, rows, self.encode(rows), self.config, self.collate)


@torch.no_grad()
def answers(
    model: nn.Module,
    rows: Sequence[Row],
    encoded: Sequence[tuple[list[Window], Offsets]],
    config: AnsweringConfig,
    collate: Collate,
) -> list[str]:
    """`Answering.answer`, of questions whose windows are there already."""
    owners = [(number, one) for number, (found, _) in enumerate(encoded) for one in found]
    best: list[tuple[float, str]] = [(-np.inf, "")] * len(rows)
    none = np.full(len(rows), np.inf)  # the score of no answer: the least of all windows
    for window, logits in _logits(model, [_input(one) for _, one in owners], config.batch_tokens, collate):
        number, one = owners[window]
        text = logits[one.place : one.place + one.size]
        none[number] = min(none[number], float(logits[0].sum()))
        if not len(text):
            continue
        first, last, score = best_span(text[:, 0], text[:, 1], config.max_answer)
        if score > best[number][0]:
            where = first + one.first, last + one.first
            best[number] = score, answer_text(rows[number]["context"], encoded[number][1], *where)
    if not config.unanswerable:
        return [text for _, text in best]
    limit = config.threshold
    return ["" if none[number] - score > limit else text for number, (score, text) in enumerate(best)]


def _logits(
    model: nn.Module, rows: list[Row], batch_tokens: int, collate: Collate
) -> Iterator[tuple[int, np.ndarray]]:
    """The number of each row and its logits [T, 2], batch by batch."""
    device = next(model.parameters()).device
    longest = max((len(row["input_ids"]) for row in rows), default=1)
    plan = partial(by_tokens, max_tokens=max(batch_tokens, longest))
    batches = Batches(rows, plan, collate, shuffle=False)
    for chosen, (_, batch) in zip(batches.order(0), batches.epoch(0)):
        output = model(**{name: one.to(device) for name, one in batch.items()})
        yield from zip(chosen.tolist(), output.logits.double().cpu().numpy())


def _input(window: Window) -> Row:
    types = {"token_type_ids": window.token_type_ids} if window.token_type_ids else {}
    return {"input_ids": window.input_ids, **types}
