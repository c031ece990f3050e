"""Questions about a real text, of which some need what stands far away.

A row is a passage of a book in the letters a to z and spaces, n characters. In its first quarter four
characters have a name (a token type). In its second half characters are hidden, and each is a question: one
with a name's type asks for the character of that name, at least n / 4 characters before (*recall*); one of
type `BACK` asks for the character `DISTANCE` before it (*back*). Answers are never shown, so that a question
asked again tells nothing. A tenth of all other places ask about the text itself: a decoder for the next
character, an encoder for one that is hidden (*text*).
"""

import dataclasses
import re
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from polyformer.bench.remembering import first_tokens

LETTERS = " abcdefghijklmnopqrstuvwxyz"
HIDDEN = len(LETTERS)
VOCABULARY = HIDDEN + 1

NAMES, REPEATS = 4, 1 / 32
"""Names in a row, and how often each is asked for, as a share of its length."""

BACK, DISTANCE = NAMES + 1, 4
TYPES = BACK + 1

ELSEWHERE = 0.1
"""Share of the other places that ask about the text."""

KINDS = "recall", "back", "text"
Side = Literal["decoder", "encoder"]


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of questions.

    inputs: what a model takes beside labels, by argument, [B, T] each.
    answers: the right token at every question [B, T], -100 elsewhere.
    kind: an index into `kinds` at every question [B, T].
    """

    inputs: dict[str, Tensor]
    answers: Tensor
    kind: Tensor
    kinds: tuple[str, ...] = KINDS


def characters(data: str | None, out: Path, train: int, held_out: int) -> tuple[Tensor, Tensor]:
    """The first `train` and `held_out` letters of a text's two parts; `data` as in `remembered_text`."""
    files = first_tokens(data, out, train, held_out)
    parts = (Path(files[role]).read_text(encoding="utf-8") for role in ("path", "validation"))
    whole = [re.sub("[^a-z]+", " ", part.lower()) for part in parts]
    ids = [torch.tensor([LETTERS.index(letter) for letter in part]) for part in whole]
    return ids[0][:train], ids[1][:held_out]


def questions(text: Tensor, rows: int, length: int, side: Side, generator: torch.Generator) -> Rows:
    """Rows drawn from `text` [N]; needs more than `length` + `DISTANCE` characters."""
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
    """1 where a character has a name, [B, T]."""
    length = rows.answers.shape[1]
    first = torch.arange(length) < length // 4
    return ((rows.inputs["token_type_ids"] > 0) & first).long()


def _places(rows: int, among: int, generator: torch.Generator) -> Tensor:
    """A random order of the first `among` places for each row."""
    return torch.rand(rows, among, generator=generator).argsort(-1)
