"""Documents in rows: packed end to end, read in order by batches, or whole with labels for some tokens.

Packed rows have equal length, without padding inside, loss or mixing of documents. Documents are concatenated
and cut every `length` tokens. A document's continuation in the next row is a new document there, with
positions from 0, so that rows are independent.

In order, every row of a batch continues the same row of the previous batch:

    rows        r0  d3 d3 d3 d3 d0 | d0 d0 d0 d5 d5 | d5 ...
                r1  d5 d5 d5 d1 d1 | d1 d1 d4 d4 d4 | d4 ...
                    batch 0          batch 1

So the memory of a model such as Transformer-XL contains the preceding text of each row. For training, the
documents of an epoch are concatenated in random order and cut into rows of equal length; the rest of a
document after a cut is a separate document. Held-out documents are not cut: they are distributed to the rows,
the longest first. Dai et al. 2019, section 3.2 (its released code: `LMOrderedIterator`).

Conversations are not cut either, so rows are not full. The longest document is placed first, each in the
fullest row with enough space (best fit, decreasing lengths), which leaves few gaps. Rows end at their last
document; padding is added by the batch. A model learns to write the tokens of the assistant. Where a template
marks them by `{% generation %}`, its marks decide. Elsewhere the text of message i, of the assistant, is what
the conversation grows by:

    before_i = render(messages[:i], add_generation_prompt=True)
    after_i = render(messages[:i + 1])
    span_i = [len(before_i), len(after_i))

So the end of the turn belongs to the message and the beginning of the turn, which the prompt of a generation
contains, does not. This needs before_i to be the beginning of after_i, and after_i that of the whole text. A
template that changes earlier messages when the conversation continues, as those that drop earlier reasoning,
is refused.
"""

import re
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from polyformer.core.errors import InputError, quote
from polyformer.data.chat import ChatTemplate, Message, RenderedChat
from polyformer.data.rows import Batch, Position
from polyformer.data.tokenizers.tokenizer import Tokenizer

IGNORED = -100


def pack(
    documents: Iterable[Sequence[int]],
    length: int,
    *,
    pad_id: int = 0,
    last: Literal["pad", "drop"] = "pad",
    overlap: int = 0,
) -> Iterator[dict[str, np.ndarray]]:
    """Yield rows of `length` tokens from `documents` (token ids each), lazily and in order.

    Each row contains int32 arrays [length]: `input_ids`; `document_ids`, from 0 in each row; `position_ids`,
    from 0 in each document; `labels`, the input ids, -100 on padded or repeated tokens. With `last="pad"` the
    last, partial row is filled with `pad_id` (as a separate document) and every row has an `attention_mask`
    (1 = keep); with `last="drop"` a partial row is left out. `overlap` tokens (default 0) are repeated
    without label at the beginning of a continued document: with 1, every token except the first of each
    document is predicted once.
    """
    if length < 1:
        raise InputError(f"length: expected at least 1 token per row, got {length}")
    if not 0 <= overlap < length:
        raise InputError(f"overlap: expected 0 to {length - 1} for rows of {length} tokens, got {overlap}")
    pieces: list[tuple[np.ndarray, int]] = []
    capacity = length
    for document in documents:
        ids = np.asarray(document, dtype=np.int32)
        start = repeated = 0
        while start + repeated < len(ids):
            piece = ids[start : start + capacity]
            pieces.append((piece, repeated))
            capacity -= len(piece)
            start, repeated = start + len(piece), 0
            if capacity == 0:
                yield packed_row(pieces, length, pad_id, masked=last == "pad")
                pieces, capacity = [], length
                # A document that is cut continues in an empty row, which has space for the repeated tokens.
                repeated = min(overlap, start)
                start -= repeated
    if pieces and last == "pad":
        yield packed_row(pieces, length, pad_id, masked=True)


def packed_row(
    pieces: list[tuple[np.ndarray, int]], length: int, pad_id: int, masked: bool
) -> dict[str, np.ndarray]:
    """Return a row of `pack` from `pieces`: (ids, number of ids that repeat the previous row)."""
    row = {
        "input_ids": np.full(length, pad_id, np.int32),
        "document_ids": np.full(length, len(pieces), np.int32),
        "position_ids": np.zeros(length, np.int32),
        "labels": np.full(length, IGNORED, np.int32),
    }
    start = 0
    for number, (ids, repeated) in enumerate(pieces):
        stop = start + len(ids)
        row["input_ids"][start:stop] = ids
        row["document_ids"][start:stop] = number
        row["position_ids"][start:stop] = np.arange(len(ids))
        row["labels"][start + repeated : stop] = ids[repeated:]
        start = stop
    row["position_ids"][start:] = np.arange(length - start)
    if masked:
        row["attention_mask"] = (np.arange(length) < start).astype(np.int32)
    return row


class SegmentLayout(NamedTuple):
    """The rows of an epoch, [rows, longest] each.

    ids: tokens. documents: the document number of each token. labels: the next tokens. places: index among
    the tokens of all documents, end to end (-1 for padding).
    """

    ids: np.ndarray
    documents: np.ndarray
    labels: np.ndarray
    places: np.ndarray


@dataclass(frozen=True, eq=False)
class Segments:
    """Batches {input_ids, document_ids, shift_labels} [rows, length] of `documents`, token ids each.

    The order is a function of (seed, epoch). Document numbers increase along a row and across epochs, and
    only they mark the end of a document: no state is reset. `shift_labels` are the next tokens of the
    document, even if they are in the next batch, so that every token except the first of each document is
    predicted once. Rows that end before others are filled with `pad_id`, a separate document without
    predictions.

    With `neighbours` [tokens, k] of the documents, end to end, batches also have `neighbour_ids` [rows,
    length, k], -1 for padding.
    """

    documents: Sequence[Sequence[int]]
    length: int
    rows: int
    seed: int = 0
    shuffle: bool = True
    pad_id: int = 0
    neighbours: np.ndarray | None = None

    def epoch(self, epoch: int, *, position: Sequence[int] = Position()) -> Iterator[tuple[Position, Batch]]:
        """Yield `(position after it, batch)` from `position` on, see `Batches.epoch`."""
        laid = self.laid(epoch)
        number = Position(*position).batch
        for start in range(number * self.length, laid.ids.shape[1], self.length):
            number += 1
            parts = SegmentLayout(*(table[:, start : start + self.length].astype(np.int64) for table in laid))
            batch = {"input_ids": parts.ids, "document_ids": parts.documents, "shift_labels": parts.labels}
            if self.neighbours is not None:
                batch["neighbour_ids"] = rows_at(self.neighbours, parts.places)
            yield Position(0, number), {name: torch.from_numpy(part) for name, part in batch.items()}

    def laid(self, epoch: int) -> SegmentLayout:
        """Return all rows of an epoch."""
        count = len(self.documents)
        first = epoch * (count + 1)  # the extra number is for padding
        order = np.arange(count)
        if self.shuffle:
            order = np.random.default_rng([self.seed, epoch]).permutation(count)
        starts = np.cumsum([0, *map(len, self.documents)])
        pieces = [
            _piece(self.documents[i], first + place, int(starts[i])) for place, i in enumerate(order.tolist())
        ]
        rows = self._cut(pieces) if self.shuffle else self._dealt(pieces)
        longest = max((row.shape[1] for row in rows), default=0)
        filling = np.array([[self.pad_id], [first + count], [IGNORED], [-1]])
        whole = np.stack([np.hstack([row, filling.repeat(longest - row.shape[1], 1)]) for row in rows])
        whole = whole[:, :, :-1]  # the last token of a row predicts nothing and is not needed as input
        return SegmentLayout(whole[:, 0], whole[:, 1], whole[:, 2], whole[:, 3])

    def _cut(self, pieces: list[np.ndarray]) -> list[np.ndarray]:
        """Return rows of equal length; the last may be shorter."""
        text = np.hstack(pieces) if pieces else np.zeros((4, 0), np.int64)
        length = max(1, -(-text.shape[1] // self.rows))
        rows = [text[:, start : start + length].copy() for start in range(0, text.shape[1], length)]
        for row in rows:
            row[2, -1] = IGNORED  # its next token is in another row, without this context
        return rows

    def _dealt(self, pieces: list[np.ndarray]) -> list[np.ndarray]:
        """Return rows of whole documents, each in order, of similar length."""
        rows: list[list[int]] = [[] for _ in range(min(self.rows, len(pieces)))]
        lengths = [0] * len(rows)
        for i in sorted(range(len(pieces)), key=lambda i: -pieces[i].shape[1]):
            shortest = lengths.index(min(lengths))
            rows[shortest].append(i)
            lengths[shortest] += pieces[i].shape[1]
        return [np.hstack([pieces[i] for i in sorted(row)]) for row in rows]


def rows_at(table: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return the rows [..., k] of a table [N, k] at places [...], as int64; -1 for places of -1."""
    if not len(table):
        return np.full((*places.shape, table.shape[1]), -1, np.int64)
    return np.where(places[..., None] < 0, -1, table[places]).astype(np.int64)


def _piece(document: Sequence[int], number: int, start: int) -> np.ndarray:
    """Return [4, length]: tokens, the document's number, labels, and their places from `start` on."""
    ids = np.asarray(document, np.int64)
    places = start + np.arange(len(ids))
    return np.stack([ids, np.full_like(ids, number), np.append(ids[1:], IGNORED), places])


Marked = tuple[Sequence[int], Sequence[bool]]
"""The token ids of a document, and which of them have labels."""


def pack_whole(documents: Sequence[Marked], length: int) -> list[dict[str, np.ndarray]]:
    """Return rows of at most `length` tokens with the fields of `packing.pack`; label -100 if not learned.

    The documents of a row, and the rows by their first document, keep their order. Raises `InputError` for a
    longer document.
    """
    longest = max((len(ids) for ids, _ in documents), default=0)
    if longest > length:
        raise InputError(f"length: a document has {longest} tokens, more than the {length} of a row")
    rows: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # (tokens left, row), in this order
    for number in sorted(range(len(documents)), key=lambda number: -len(documents[number][0])):
        size = len(documents[number][0])
        place = bisect_left(spaces, (size, -1))
        if place == len(spaces):
            rows.append([])
            spaces.append((length, len(rows) - 1))
            place = len(spaces) - 1
        space, row = spaces.pop(place)
        rows[row].append(number)
        insort(spaces, (space - size, row))
    return [marked_row([documents[number] for number in sorted(row)]) for row in sorted(rows, key=min)]


def marked_row(documents: Sequence[Marked]) -> dict[str, np.ndarray]:
    """Return a row of these documents, without padding."""
    pieces = [(np.asarray(ids, np.int32), 0) for ids, _ in documents]
    row = packed_row(pieces, sum(len(ids) for ids, _ in pieces), 0, masked=False)
    learned = np.concatenate([np.asarray(marks, bool) for _, marks in documents])
    row["labels"] = np.where(learned, row["labels"], IGNORED).astype(np.int32)
    return row


ASSISTANT = "assistant"

TAG = re.compile(r"\{%[-+]?\s*generation\b")
"""The tag by which a template marks what the assistant writes."""


def learned_spans(
    chat: ChatTemplate,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    last_only: bool = False,
) -> RenderedChat:
    """Return the text of a conversation with the spans of the assistant's messages.

    last_only: only the span of the last message, which is the assistant's. Raises `InputError` for a template
    that refuses the conversation or changes its beginning when it continues, and without `{% generation %}`
    for a conversation that the assistant begins.
    """
    if TAG.search(chat.source(tools)) and not last_only:
        return chat.render_spans(messages, tools)
    whole = chat.render_spans(messages, tools)
    if last_only:
        start = len(_prompt(chat, messages, len(messages) - 1, tools, whole.text))
        marked = [span for span in whole.spans if span[1] > start]
        return RenderedChat(whole.text, tuple(marked) or ((start, len(whole.text)),))
    spans: list[tuple[int, int]] = []
    for number, message in enumerate(messages):
        if message.get("role") == ASSISTANT:
            after = whole.text
            if number + 1 < len(messages):
                after = chat.render(messages[: number + 1], tools=tools)
                _check_beginning(chat, after, whole.text, tools)
            spans.append((len(_prompt(chat, messages, number, tools, after)), len(after)))
    return RenderedChat(whole.text, tuple(spans))


def learned_tokens(
    tokenizer: Tokenizer, conversation: Mapping[str, Any], *, last_only: bool = False
) -> tuple[list[int], list[bool]]:
    """Return the ids of {"messages": [...], "tools": [...]}, and which of them are learned."""
    assert tokenizer.chat is not None
    messages, tools = conversation["messages"], conversation.get("tools")
    return tokenizer.encode_chat(learned_spans(tokenizer.chat, messages, tools, last_only=last_only))


def _prompt(chat: ChatTemplate, messages: Sequence[Message], number: int, tools: Any, after: str) -> str:
    """Return the text before message `number`, which is the beginning of the text `after` it."""
    if number == 0:
        raise InputError(
            "messages: the assistant's message is the first, so that nothing precedes it; begin with a "
            "message of the user, or use a chat template that marks the assistant by {% generation %}"
        )
    before = chat.render(messages[:number], tools=tools, add_generation_prompt=True)
    _check_beginning(chat, before, after, tools)
    return before


def _check_beginning(chat: ChatTemplate, shorter: str, longer: str, tools: Any) -> None:
    """Raise `InputError` that names the template if a text is not the beginning of the continued text."""
    if longer.startswith(shorter):
        return
    pairs = enumerate(zip(shorter, longer))
    place = next((place for place, (a, b) in pairs if a != b), min(len(shorter), len(longer)))
    name = next(name for name, source in chat.sources.items() if source == chat.source(tools))
    raise InputError(
        f"chat template {quote(name)}: it changes the beginning of a conversation that continues, at "
        f"{quote(shorter[max(0, place - 20) : place + 20])}, so that the assistant's text cannot be told "
        "from the rest; use a template that marks it by {% generation %}, with --task.template FILE"
    )
