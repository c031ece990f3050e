"""Encoders that answer questions about facts: every segment of a row has a global token, its question.

    question 5   question 2   | 5=1  7=0  2=3 |  2=6  5=4  7=7 |
    segment 0    segment 1      segment 0        segment 1

A fact is a single token for a key and a value; the answer to "question 5" is the value of key 5 in the place
that the questions are about.
"""

from typing import Literal

import torch

from polyformer.models.architectures import Transformer
from polyformer.training import Batch
from polyformer_lab.cells import Cell, Row, measurement
from polyformer_lab.measures.generated import HELD_OUT, Options, tagger, trained


@measurement()
def segment_facts(
    cell: Cell, model: Options, facts: Options, rows: int, tested: int, steps: int, lr: float
) -> Row:
    """Return the share of right answers.

    Args:
        cell: the cell; its folder gets the training.
        model: a preset and its options; its pattern has as many global tokens as a row has segments.
        facts: the arguments of `drawn`.
        rows: rows in a batch.
        tested: the number of test rows.
        steps: training steps.
        lr: the highest learning rate.
    """
    encoder = trained(
        cell, lambda: created(model, **facts), lambda generator: drawn(rows, generator, **facts), steps, lr
    )
    batch = drawn(tested, torch.Generator().manual_seed(HELD_OUT), **facts)
    with torch.no_grad():
        right = encoder(**batch).logits.argmax(-1) == batch["labels"]
    return {"accuracy": float(right[:, : facts["segments"]].float().mean())}


def created(model: Options, segments: int, length: int, values: int, place: str) -> Transformer:
    """Return an encoder with fresh weights that names a value at every token."""
    return tagger(model, segments * length * (values + 1), values)


def drawn(
    rows: int,
    generator: torch.Generator,
    *,
    segments: int,
    length: int,
    values: int,
    place: Literal["own", "other"],
) -> Batch:
    """Return rows of segments of facts, with a question before them for each segment.

    The fact "key k has the value v" is token `values` k + v, and tokens after all facts are the questions.

    Args:
        rows: rows in the batch.
        generator: the source of random numbers.
        segments: segments in a row.
        length: facts in a segment.
        values: the number of values.
        place: "own": all segments have facts about the same keys, each with its own values, and a question is
            about its own segment. "other": every key occurs once in a row, and a question is about another
            segment.
    """
    keys = torch.rand(rows, segments * length, generator=generator).argsort(1).view(rows, segments, length)
    own, shift = torch.arange(segments), torch.zeros(rows, segments, dtype=torch.long)
    if place == "own":
        order = torch.rand(rows, segments, length, generator=generator).argsort(2)
        keys = keys[:, :1].expand(-1, segments, -1).gather(2, order)
    else:
        shift = torch.randint(1, segments, (rows, segments), generator=generator)
    answers = torch.randint(values, keys.shape, generator=generator)
    asked = (own + shift) % segments * length
    asked += torch.randint(length, (rows, segments), generator=generator)
    question, answer = (each.flatten(1).gather(1, asked) for each in (keys, answers))
    text, unlabelled = (keys * values + answers).flatten(1), torch.full((rows, segments * length), -100)
    numbers = torch.cat([own, own.repeat_interleave(length)])
    return {
        "input_ids": torch.cat([segments * length * values + question, text], 1),
        "segment_ids": numbers.expand(rows, -1),
        "token_type_ids": (torch.arange(len(numbers)) >= segments).long().expand(rows, -1),
        "labels": torch.cat([answer, unlabelled], 1),
    }
