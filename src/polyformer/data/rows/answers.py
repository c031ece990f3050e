"""Extractive question answering: windows of tokens, and conversion of answers between characters and tokens.

A text longer than a row is read in overlapping windows that begin `stride` tokens apart:

    <cls> question <sep> window of the text <sep>        token types 0 0 0 1 1, the first <sep> being 0

Source: Devlin et al. 2019, section 4.2, and for windows the released run_squad.py (length 384, stride 128,
questions of at most 64 tokens, answers of at most 30).
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from polyformer.core.errors import InputError
from polyformer.data.tokenizers.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tokenizers import Encoding

NO_ANSWER = (0, 0)  # both ends of the answer on <cls>

Offsets = Sequence[tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class Window:
    """A row of a question and a part of the text.

    place: position of the first text token in the row. first: index of that token in the text. size: number
    of text tokens. token_type_ids are empty if the model has none.
    """

    input_ids: list[int]
    token_type_ids: list[int]
    place: int
    first: int
    size: int

    def labels(self, span: tuple[int, int] | None) -> tuple[int, int]:
        """Return the positions of the first and last token of `span`, a span of text tokens.

        Returns the position of <cls> twice if the span is not completely in this window.
        """
        if span is None or span[0] < self.first or span[1] >= self.first + self.size:
            return NO_ANSWER
        return span[0] - self.first + self.place, span[1] - self.first + self.place


def windows(
    question: Sequence[int], text: Sequence[int], *, cls_id: int, sep_id: int, length: int, stride: int
) -> list[Window]:
    """Split `text` into windows of at most `length` tokens, including question and special tokens.

    length: of the question, 3 special tokens and at least `stride` tokens of the text.
    """
    start = len(question) + 2
    types = [0] * start + [1] * (len(text) + 1)
    return _cut([cls_id, *question, sep_id, *text, sep_id], types, start, start + len(text), length, stride)


def encode_with_offsets(tokenizer: Tokenizer, texts: Sequence[str]) -> list[tuple[list[int], Offsets]]:
    """Return the ids of each text, and for every token the start and the end of its characters."""
    encoded = tokenizer.backend.encode_batch(list(texts), add_special_tokens=False)
    if [encoding.ids for encoding in encoded] != tokenizer.encode_batch(texts):
        raise InputError("tokenizer: it gives no character offsets of its tokens; use another tokenizer")
    return [(encoding.ids, encoding.offsets) for encoding in encoded]


def encode_marked(
    tokenizer: Tokenizer, texts: Sequence[str], pairs: Sequence[str] | None = None
) -> "list[Encoding]":
    """Return each text with the model's special tokens; every token has its text and characters."""
    encoded = tokenizer.marking.encode_batch(list(texts) if pairs is None else list(zip(texts, pairs)))
    ids = [(encoding.ids, encoding.type_ids) for encoding in encoded]
    if ids != tokenizer.encode_batch_for_model(texts, pairs):
        raise InputError("tokenizer: it gives no character offsets of its tokens; use another tokenizer")
    return encoded


def marked_windows(pair: "Encoding", *, length: int, stride: int, typed: bool) -> list[Window]:
    """Split the text that `pair` joins to a question into windows of at most `length` tokens.

    Windows begin at most `stride` tokens apart; each contains the question and the special tokens. `typed`
    adds token types.
    """
    places = [place for place, side in enumerate(pair.sequence_ids) if side == 1]
    start, stop = (places[0], places[-1] + 1) if places else (len(pair.ids), len(pair.ids))
    capacity = length - start - (len(pair.ids) - stop)
    if capacity < 1:
        raise InputError(
            f"question: expected at most {length} tokens with its marks, got {length - capacity}"
        )
    windows = _cut(pair.ids, pair.type_ids, start, stop, length, min(stride, capacity))
    return windows if typed else [dataclasses.replace(window, token_type_ids=[]) for window in windows]


def _cut(ids: list[int], types: list[int], start: int, stop: int, length: int, stride: int) -> list[Window]:
    """Return rows with the text `ids[start:stop]` in windows, between the tokens before and after it."""
    capacity = length - start - (len(ids) - stop)
    windows = []
    for first in range(0, max(stop - start - capacity + stride, 1), stride):
        text = slice(start + first, min(start + first + capacity, stop))
        row_ids, row_types = ([*row[:start], *row[text], *row[stop:]] for row in (ids, types))
        windows.append(Window(row_ids, row_types, start, first, text.stop - text.start))
    return windows


def answer_tokens(offsets: Offsets, start: int, stop: int) -> tuple[int, int] | None:
    """Return the first and the last token with characters from `start` to `stop`; None if there are none."""
    touched = [number for number, (a, b) in enumerate(offsets) if a < stop and b > start and b > a]
    return (touched[0], touched[-1]) if touched else None


def best_span(starts: np.ndarray, ends: np.ndarray, longest: int) -> tuple[int, int, float]:
    """Return `(first, last, score)` of the span of at most `longest` tokens with the best sum of scores."""
    scores = starts[:, None] + ends[None, :]
    lengths = np.arange(len(ends))[None, :] - np.arange(len(starts))[:, None]
    scores[(lengths < 0) | (lengths >= longest)] = -np.inf
    first, last = np.unravel_index(int(scores.argmax()), scores.shape)
    return int(first), int(last), float(scores[first, last])


def answer_text(text: str, offsets: Offsets, first: int, last: int) -> str:
    """Return the text of the tokens `first` to `last`."""
    return text[offsets[first][0] : offsets[last][1]].strip()
