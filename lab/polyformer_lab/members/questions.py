"""Questions about a real text, a part with answers in distant tokens.

A row is a passage of a book in the letters a to z and spaces, n characters. In its first quarter four
characters have a name (a token type). In its second half characters are hidden, and each hidden character is
a question: the type of a name requires the character of that name, at least n / 4 characters before
(*recall*); the type `BACK` requires the character `DISTANCE` before it (*back*). Answers are never shown, so
that a repeated question reveals nothing. A tenth of all other places are questions about the text itself: a
decoder predicts the next character, an encoder a hidden character (*text*).
"""

import dataclasses
import functools
import json
import re
from typing import Literal

import torch
from torch import Tensor

LETTERS = " abcdefghijklmnopqrstuvwxyz"
HIDDEN = len(LETTERS)
VOCABULARY = HIDDEN + 1

NAMES, REPEATS = 4, 1 / 32
"""The number of names in a row, and the questions about each name, as a share of the row's length."""

BACK, DISTANCE = NAMES + 1, 4
TYPES = BACK + 1

ELSEWHERE = 0.1
"""The share of the other places that are questions about the text."""

KINDS = "recall", "back", "text"
Side = Literal["decoder", "encoder"]


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of questions.

    inputs: inputs of a model except labels, by argument, [B, T] each.
    answers: the right token at every question [B, T], -100 elsewhere.
    kind: an index into `kinds` at every question [B, T].
    """

    inputs: dict[str, Tensor]
    answers: Tensor
    kind: Tensor
    kinds: tuple[str, ...] = KINDS


@functools.cache
def letters(file: str, count: int) -> Tensor:
    """Return the first letters of the first document in a file written by a preparation."""
    with open(file, encoding="utf-8") as lines:
        text = json.loads(lines.readline())["text"]
    own = re.sub("[^a-z]+", " ", text.lower())[:count]
    return torch.tensor([LETTERS.index(letter) for letter in own])


def questions(text: Tensor, rows: int, length: int, side: Side, generator: torch.Generator) -> Rows:
    """Return rows drawn from `text` [N], of more than `length` + `DISTANCE` characters."""
    start = torch.randint(len(text) - length - DISTANCE, (rows, 1), generator=generator)
    passage = text[start + torch.arange(length + DISTANCE + 1)]
    ids, following, earlier = (passage[:, shift : shift + length] for shift in (DISTANCE, DISTANCE + 1, 0))
    types, kind = torch.zeros_like(ids), torch.full_like(ids, KINDS.index("text"))
    answers = torch.full_like(ids, -100)

    named = _places(rows, length // 4, generator)[:, :NAMES]
    types.scatter_(1, named, torch.arange(1, NAMES + 1).expand(rows, NAMES))
    asked = torch.arange(NAMES).repeat(max(1, int(length * REPEATS)))
    places = _places(rows, length - length // 2, generator)[:, : len(asked) + len(asked) // 2] + length // 2
    recall, back = places.split([len(asked), len(asked) // 2], 1)
    types.scatter_(1, recall, (asked + 1).expand(rows, -1)).scatter_(1, back, BACK)
    answers.scatter_(1, recall, ids.gather(1, named[:, asked]))
    answers.scatter_(1, back, earlier.gather(1, back))
    kind.scatter_(1, recall, KINDS.index("recall")).scatter_(1, back, KINDS.index("back"))

    others = (types == 0) & (torch.rand(types.shape, generator=generator) < ELSEWHERE)
    answers = torch.where(others, following if side == "decoder" else ids, answers)
    hidden = torch.zeros_like(others).scatter_(1, places, True)
    hidden = hidden | others if side == "encoder" else hidden
    source = torch.cat([torch.zeros_like(hidden[:, :DISTANCE]), hidden[:, :-DISTANCE]], 1)
    answers = answers.masked_fill((types == BACK) & source, -100)  # its character is hidden too
    inputs = {"input_ids": ids.masked_fill(hidden, HIDDEN), "token_type_ids": types}
    return Rows(inputs, answers, kind)


def named_places(rows: Rows) -> Tensor:
    """Return 1 for each character that has a name, [B, T]."""
    length = rows.answers.shape[1]
    first = torch.arange(length) < length // 4
    return ((rows.inputs["token_type_ids"] > 0) & first).long()


def _places(rows: int, among: int, generator: torch.Generator) -> Tensor:
    """Return a random order of the first `among` places for each row."""
    return torch.rand(rows, among, generator=generator).argsort(-1)
