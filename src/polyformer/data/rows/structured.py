"""Rows with structure: two texts, a question and a window of a text, or sentences with their global tokens.

Two texts: from pairs of segments a model learns whether the second follows the first, or their order. A
document is a list of sentences, a sentence a list of token ids. Sentences are collected up to `length` tokens
and split in two after one of them, which gives a pair:

    label  next_sentence_pairs              sentence_order_pairs
    0      A, and B that follows it         A, and B that follows it
    1      A, and a piece of another text   B, and A that precedes it

For `short_share` of the documents fewer tokens are collected, 2 to `length` with equal probability. All
functions are pure in the documents and the generator.

A question: a text longer than a row is read in overlapping windows that begin `stride` tokens apart, and
answers are converted between characters and tokens:

    <cls> question <sep> window of the text <sep>        token types 0 0 0 1 1, the first <sep> being 0

Sentences: their global tokens precede the tokens of the text.

    row = structured([[11, 12], [13]], global_id=1, global_tokens=4)

    input_ids       1  1 11 12 13      the global tokens, then the text
    segment_ids     0  1  0  0  1      the sentence of each token
    position_ids    0  1  4  5  6      the text starts at `global_tokens`, for any number of sentences
    token_type_ids  0  0  1  1  1      global, long
    attention_mask  1  1  1  1  1

The pattern `ETC(global_tokens, radius)` and the positions `etc_labels` require such rows. `Collate` makes a
batch of them for `model(**Collate(pad_id)([row, ...]))`. Global slots that a document does not need are left
out instead of padded: distances count only between tokens of the same part.

Sources: Devlin et al. 2019 (BERT), section 3.1, task 2, and appendix A.2, with the choices of the released
create_pretraining_data.py; section 4.2, and for windows the released run_squad.py (length 384, stride 128,
questions of at most 64 tokens, answers of at most 30). Lan et al. 2020 (ALBERT), section 3.1, and section 4.1
for the share of 10 %. Ainslie et al. 2020 (ETC), section 3; as in their released models all global tokens
have the same id.
"""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from polyformer.core.errors import InputError
from polyformer.data.tokenizers.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tokenizers import Encoding


Ids = Sequence[int]


class Pair(NamedTuple):
    """Token ids of two texts, and the class of the pair."""

    first: Ids
    second: Ids
    label: int


def shares_of_capacity(first: int, second: int, length: int) -> tuple[int, int]:
    """Return two lengths reduced to a sum of `length`.

    The longer length, or the second of equal lengths, is reduced by one repeatedly.
    """
    if first + second <= length:
        return first, second
    kept = min(first, max(length - second, (length + 1) // 2))
    return kept, length - kept


def cut_pair(first: Ids, second: Ids, length: int, generator: np.random.Generator) -> tuple[Ids, Ids]:
    """Truncate both texts to `length` tokens in total: the longer loses tokens, from its front or its back.

    Source: the released create_pretraining_data.py of BERT (Devlin et al. 2019).
    """
    kept = shares_of_capacity(len(first), len(second), length)
    return _cut(first, kept[0], generator), _cut(second, kept[1], generator)


def _cut(ids: Ids, kept: int, generator: np.random.Generator) -> Ids:
    front = int(generator.binomial(len(ids) - kept, 0.5))
    return ids[front : front + kept]


def pair_row(pair: Pair, *, cls_id: int, sep_id: int) -> dict[str, list[int] | int]:
    """Return the row <cls> first <sep> second <sep>.

    Token types are 0 up to the first <sep> and 1 after it. The row has `sentence_labels`. Source: Devlin et
    al. 2019, section 3.1 and figure 2.
    """
    return {
        "input_ids": [cls_id, *pair.first, sep_id, *pair.second, sep_id],
        "token_type_ids": [0] * (len(pair.first) + 2) + [1] * (len(pair.second) + 1),
        "sentence_labels": pair.label,
    }


def translation_row(
    source: Sequence[int],
    target: Sequence[int],
    *,
    begin_id: int,
    end_id: int,
    languages: tuple[int, int] = (0, 1),
    length: int | None = None,
) -> dict[str, np.ndarray]:
    """Return a translation pair as one row, int32 arrays of at most `length` tokens, for masked modelling.

        input_ids     <b> x x x <e> <b> y y <e>
        position_ids   0  1 2 3  4   0  1 2  3      restarted in the second language
        langs          0  0 0 0  0   1  1 1  1      a language for every token

    The longer text is truncated at its end. `begin_id` and `end_id` enclose each of the two, in XLM both
    </s>. `languages` are the numbers of the two languages in the model's table. Source: Lample and Conneau
    2019 (XLM), section 3.4 and figure 1.
    """
    if length is not None:
        if length < 6:
            raise InputError(f"length: expected 6 tokens or more, a token of each text in four, got {length}")
        kept = shares_of_capacity(len(source), len(target), length - 4)
        source, target = source[: kept[0]], target[: kept[1]]
    parts = [[begin_id, *ids, end_id] for ids in (source, target)]
    return {
        "input_ids": np.array([*parts[0], *parts[1]], np.int32),
        "position_ids": np.concatenate([np.arange(len(part), dtype=np.int32) for part in parts]),
        "langs": np.repeat(np.array(languages, np.int32), [len(part) for part in parts]),
    }


Document = Sequence[Ids]


def next_sentence_pairs(
    documents: Sequence[Document], generator: np.random.Generator, *, length: int, short_share: float = 0.1
) -> Iterator[Pair]:
    """Yield pairs: half of the second segments follow the first, the others are from another document.

    The text that would have followed is returned and begins the next pair. If only one sentence is left, its
    second segment always comes from another document, where it starts at a random sentence. Pairs longer than
    `length` tokens are cut: see `cut_pair`.
    """
    documents = _filled(documents, length, short_share)
    if len(documents) < 2:
        raise InputError(
            f"documents: expected two or more with text in them, got {len(documents)}; a plain text is one "
            "document unless data.format says what ends one (paragraphs, articles, lines)"
        )
    for number, document in enumerate(documents):
        target = _target(length, short_share, generator)
        start = 0
        while start < len(document):
            stop = _gather(document, start, target)
            alone = stop - start == 1
            middle = stop if alone else start + int(generator.integers(1, stop - start))
            first = _joined(document[start:middle])
            if alone or generator.random() < 0.5:
                second, label = _elsewhere(documents, number, target - len(first), generator), 1
                start = middle
            else:
                second, label = _joined(document[middle:stop]), 0
                start = stop
            yield Pair(*cut_pair(first, second, length, generator), label)


def sentence_order_pairs(
    documents: Sequence[Document], generator: np.random.Generator, *, length: int, short_share: float = 0.1
) -> Iterator[Pair]:
    """Yield pairs, half of them swapped. A single collected sentence makes no pair."""
    for document in _filled(documents, length, short_share):
        target = _target(length, short_share, generator)
        start = 0
        while start < len(document):
            stop = _gather(document, start, target)
            if stop - start > 1:
                middle = start + int(generator.integers(1, stop - start))
                first, second = _joined(document[start:middle]), _joined(document[middle:stop])
                first, second = cut_pair(first, second, length, generator)
                swapped = bool(generator.random() < 0.5)
                yield Pair(second, first, 1) if swapped else Pair(first, second, 0)
            start = stop


def _filled(documents: Sequence[Document], length: int, short_share: float) -> list[list[Ids]]:
    """Return the documents without empty sentences and documents."""
    if length < 2:
        raise InputError(f"length: expected 2 tokens or more for a pair, got {length}")
    if not 0 <= short_share <= 1:
        raise InputError(f"short_share: expected a share in [0, 1], got {short_share}")
    filled = ([sentence for sentence in document if len(sentence)] for document in documents)
    return [document for document in filled if document]


def _target(length: int, short_share: float, generator: np.random.Generator) -> int:
    return int(generator.integers(2, length + 1)) if generator.random() < short_share else length


def _gather(document: Document, start: int, target: int) -> int:
    """Return the end of the sentences from `start` on that have `target` tokens or end the document."""
    tokens, stop = 0, start
    while stop < len(document) and tokens < target:
        tokens += len(document[stop])
        stop += 1
    return stop


def _elsewhere(documents: list[list[Ids]], number: int, target: int, generator: np.random.Generator) -> Ids:
    """Return at least one sentence, from a random start, of a document other than `number`."""
    other = int(generator.integers(len(documents) - 1))
    document = documents[other + (other >= number)]
    start = int(generator.integers(len(document)))
    return _joined(document[start : max(_gather(document, start, target), start + 1)])


def _joined(sentences: Document) -> list[int]:
    return [token for sentence in sentences for token in sentence]


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
    return _windows(
        [cls_id, *question, sep_id, *text, sep_id], types, start, start + len(text), length, stride
    )


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
    windows = _windows(pair.ids, pair.type_ids, start, stop, length, min(stride, capacity))
    return windows if typed else [dataclasses.replace(window, token_type_ids=[]) for window in windows]


def _windows(
    ids: list[int], types: list[int], start: int, stop: int, length: int, stride: int
) -> list[Window]:
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


Row = dict[str, np.ndarray]

END = re.compile(r"(?<=[.!?])\s+|\n\s*\n")


def split_sentences(text: str) -> list[str]:
    """Return the sentences of a text, split after . ! and ? before white space, and at empty lines."""
    return [part.strip() for part in END.split(text) if part.strip()]


def sentence_row(tokenizer: Tokenizer, text: str, limit: int) -> tuple[list[str], dict[str, list[int]]]:
    """Return the first sentences of a text, and <cls> sentence <sep> for each, with types 0 and 1 in turn.

    Sentences that do not fit in `limit` tokens are left out; a longer first sentence is cut. A text without
    sentences is <cls> <sep>. The tokenizer must have both. Liu and Lapata 2019 (BertSum), section 3.1.
    """
    cls, sep = tokenizer.cls_id, tokenizer.sep_id
    assert cls is not None
    assert sep is not None
    sentences: list[str] = []
    ids: list[int] = []
    types: list[int] = []
    split = split_sentences(text)
    for number, pieces in enumerate(tokenizer.encode_batch(split)):
        row = [cls, *pieces, sep]
        if sentences and len(ids) + len(row) > limit:
            break
        row = [*row[: limit - 1], sep] if len(row) > limit else row
        sentences.append(split[number])
        ids += row
        types += [number % 2] * len(row)
    if not sentences:
        ids, types = [cls, sep], [0, 0]
    return sentences, {"input_ids": ids, "token_type_ids": types}


def structured(sentences: Sequence[Sequence[int]], *, global_id: int, global_tokens: int) -> Row:
    """Return a row of a document: int64 arrays [sentences + tokens] as above.

    Raises `InputError` for more sentences than `global_tokens`, for no sentences and for an empty sentence.
    """
    check_sentences(sentences, global_tokens)
    numbers = np.arange(len(sentences))
    lengths = np.array([len(sentence) for sentence in sentences])
    text = np.concatenate([np.asarray(sentence, dtype=np.int64) for sentence in sentences])
    places = np.arange(len(text)) + global_tokens
    return {
        "input_ids": np.concatenate([np.full(len(numbers), global_id, dtype=np.int64), text]),
        "segment_ids": np.concatenate([numbers, numbers.repeat(lengths)]),
        "position_ids": np.concatenate([numbers, places]),
        "token_type_ids": np.concatenate([np.zeros_like(numbers), np.ones_like(places)]),
        "attention_mask": np.ones(len(numbers) + len(text), dtype=np.int64),
    }


def check_sentences(sentences: Sequence[Sequence[int]], global_tokens: int) -> None:
    """Raise `InputError` unless there are sentences, none empty, and a global token for each."""
    if not 1 <= len(sentences) <= global_tokens:
        raise InputError(
            f"sentences: expected 1 to {global_tokens} (global_tokens), got {len(sentences)}; "
            "cut the document with `documents_of` or raise global_tokens"
        )
    for number, sentence in enumerate(sentences):
        if not len(sentence):
            raise InputError(f"sentences: expected tokens in each, got none in number {number}; leave it out")


def documents_of(
    sentences: Sequence[Sequence[int]], *, global_tokens: int, long_tokens: int
) -> list[list[Sequence[int]]]:
    """Split sentences into documents of at most `global_tokens` sentences and `long_tokens` tokens, in order.

    Empty sentences are left out; a sentence longer than `long_tokens` is split into several.
    """
    if min(global_tokens, long_tokens) < 1:
        raise InputError(
            f"global_tokens, long_tokens: expected 1 or more, got {global_tokens} and {long_tokens}"
        )
    documents: list[list[Sequence[int]]] = []
    capacity = 0
    for whole in sentences:
        for piece in (whole[i : i + long_tokens] for i in range(0, len(whole), long_tokens)):
            if not documents or len(piece) > capacity or len(documents[-1]) == global_tokens:
                documents.append([])
                capacity = long_tokens
            documents[-1].append(piece)
            capacity -= len(piece)
    return documents
