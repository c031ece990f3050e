"""Word vectors for tokens that are words: from files of word2vec and GloVe, or trained on a text.

    word2vec, text      "COUNT WIDTH", then a line "word x_1 .. x_WIDTH" for each word
    word2vec, binary    "COUNT WIDTH", then "word " and WIDTH float32 numbers, little-endian, for each
    GloVe               such lines without a header

A file, gzipped or not, is read once, row by row; only the rows of requested words are parsed and kept.
gensim trains vectors by skip-gram or CBOW, and writes a file for `train --pretrained-vectors`; words are then
runs of letters and digits, in lower case unless `cased`.

Mikolov et al. 2013 (skip-gram, CBOW); Pennington et al. 2014 (GloVe).
"""

import dataclasses
import io
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

import numpy as np

from polyformer.core.config import Config
from polyformer.core.errors import InputError, quote
from polyformer.core.files import atomic_write
from polyformer.core.imports import needs_extra
from polyformer.core.ranges import VECTOR_WIDTH, VECTOR_WORD, NonNegativeInt, PositiveInt
from polyformer.data.prepared import Settings
from polyformer.data.prepared.preparing import pieces, sources_of, texts_of
from polyformer.data.rows.masking import word_starts
from polyformer.data.sources.files import opened_bytes
from polyformer.data.tokenizers.tokenizer import Tokenizer

Row = tuple[bytes, bytes]
"""A word, and its numbers in the file's encoding."""


@dataclasses.dataclass(frozen=True, eq=False)
class WordVectors:
    """Vectors of some words in a file: `ids` [N], vectors [N, width]; `words` is the file's word count."""

    ids: np.ndarray
    vectors: np.ndarray
    words: int

    @property
    def width(self) -> int:
        """Return the numbers per vector."""
        return self.vectors.shape[1]


def word_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the tokens that are whole words, or begin words, as text without the mark of a beginning.

    Special tokens are excluded. Raises `InputError` if pieces mark the ends of words instead of the
    beginnings.
    """
    starts, ids = word_starts(tokenizer), dict[str, int]()
    for number in tokenizer.ordinary_ids[starts[tokenizer.ordinary_ids]].tolist():
        word = tokenizer.decode([number]).strip()
        if word and "\ufffd" not in word:
            ids.setdefault(word, number)
    return ids


def read_word_vectors(path: str | Path, ids: Mapping[str, int]) -> WordVectors:
    """Read the vectors of the words in `ids`.

    Raises `InputError` for a file that has none of the three formats or is truncated, for a word that is not
    UTF-8, for a requested word that occurs twice or has a number that is not finite, and if no requested word
    occurs.
    """
    path = Path(path)
    rows: dict[int, np.ndarray] = {}
    with opened_bytes(path) as file:
        entries, binary = _entries(file, path)
        count = 0
        for word, numbers in entries:
            count += 1
            number = ids.get(_text(word, path, count))
            if number is None:
                continue
            if number in rows:
                raise InputError(f"{path}: the word {quote(_text(word, path, count))} occurs twice")
            vector = _binary_numbers(numbers) if binary else _text_numbers(numbers, path, count)
            if not np.isfinite(vector).all():
                raise InputError(
                    f"{path}: a number of {quote(_text(word, path, count))} is not finite; leave the word out"
                )
            rows[number] = vector
    if not rows:
        raise InputError(
            f"{path}: none of its {count:,} words is a token; take a tokenizer of whole words "
            "(--tokenizer.algorithm wordpiece, of many tokens), of the same case as the file"
        )
    return WordVectors(np.array(list(rows)), np.stack(list(rows.values())), count)


def _entries(file: BinaryIO, path: Path) -> tuple[Iterator[Row], bool]:
    """Return the rows of the file, and whether their numbers are binary."""
    line = file.readline(VECTOR_WIDTH * 32)
    if not line.strip():
        raise InputError(f"{path}: empty; expected word vectors")
    header = line.split()
    if len(header) == 2 and all(field.isdigit() for field in header):
        count, width = (int(field[:20]) for field in header)
        if not (count and 1 <= width <= VECTOR_WIDTH):
            raise InputError(
                f"{path}: a header of {count} words and {width} numbers each; expected 1 or more words and "
                f"1 to {VECTOR_WIDTH} numbers"
            )
        start = cast(io.BufferedReader, file).peek(1024)[:1024]
        if any(byte < 32 and byte not in b"\t\n\r" for byte in start):
            return _binary_rows(file, count, width, path), True
        return _text_rows(_lines(file), count, width, path), False
    width = len(header) - 1
    if width < 1 or _floats(header[1:]) is None:
        raise InputError(
            f"{path}: expected 'COUNT WIDTH' (word2vec) or a word and its numbers (GloVe) in the first line, "
            f"got {quote(line[:80])}"
        )
    return _text_rows(itertools.chain([line], _lines(file)), None, width, path), False


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of the rest of the file; an overlong line is cut."""
    while line := file.readline(VECTOR_WIDTH * 32):
        yield line


def _text_rows(lines: Iterable[bytes], count: int | None, width: int, path: Path) -> Iterator[Row]:
    """Yield rows; a word may contain spaces, its numbers are the last `width` fields."""
    number = 0
    for line in lines:
        line = line.strip(b" \r\n\t")
        if not line:
            continue
        number += 1
        fields = line.replace(b"\t", b" ").rsplit(b" ", width)
        if len(fields) != width + 1:
            raise InputError(
                f"{path}: expected a word and {width} numbers in row {number}, got {len(fields)} fields; cut "
                "short, or with a wrong header"
            )
        yield fields[0], b" ".join(fields[1:])
        if number == count and any(line.strip() for line in lines):
            raise InputError(f"{path}: a wrong header: more rows than the {count:,} that it says")
    if count is not None and number < count:
        raise InputError(f"{path}: cut short: {number:,} rows of the {count:,} that its header says")


def _binary_rows(file: BinaryIO, count: int, width: int, path: Path) -> Iterator[Row]:
    """Yield rows; they end with a newline or without, depending on the program that wrote them."""
    for number in range(1, count + 1):
        word = _word(file)
        numbers = b"" if word is None else file.read(4 * width)
        if word is None or len(numbers) < 4 * width:
            raise InputError(
                f"{path}: cut short in row {number:,} of the {count:,} that its header says, or of "
                f"another width than its {width}"
            )
        yield word.lstrip(b"\n"), numbers
    if file.read(2).strip(b"\n"):
        raise InputError(f"{path}: a wrong header: more rows than the {count:,} that it says")


def _word(file: BinaryIO) -> bytes | None:
    """Return the bytes before the next space and skip it; None if it does not occur soon."""
    word = bytearray()
    while len(word) < VECTOR_WORD and (byte := file.read(1)):
        if byte == b" ":
            return bytes(word)
        word += byte
    return None


def _text(word: bytes, path: Path, number: int) -> str:
    try:
        return word.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: the word of row {number:,}, {quote(word)}, is no UTF-8; convert the file, for example "
            "with iconv -c"
        ) from error


def _binary_numbers(numbers: bytes) -> np.ndarray:
    return np.frombuffer(numbers, "<f4").astype(np.float32)


def _text_numbers(numbers: bytes, path: Path, number: int) -> np.ndarray:
    floats = _floats(numbers.split(b" "))
    if floats is None:
        raise InputError(f"{path}: expected numbers in row {number:,}, got {quote(numbers[:80])}")
    return np.array(floats, dtype=np.float32)


def _floats(fields: Iterable[bytes]) -> list[float] | None:
    try:
        return [float(field) for field in fields]
    except ValueError:
        return None


WORD = re.compile(r"\w+")


@dataclass(frozen=True, kw_only=True)
class VectorSettings(Config):
    """Options of the training; gensim's defaults otherwise."""

    algorithm: Literal["skipgram", "cbow"] = "skipgram"
    width: PositiveInt = 64
    epochs: PositiveInt = 5
    window: PositiveInt = 5  # words on either side, at most
    least: PositiveInt = 5  # occurrences of a word that gets a vector
    cased: bool = False
    seed: NonNegativeInt = 0
    workers: PositiveInt = 1  # with several threads a repetition gives other vectors


class Sentences:
    """An iterable over the lines of texts, each a list of words; gensim reads it once per epoch."""

    def __init__(self, names: Sequence[str], reading: Settings, cased: bool):
        self.sources = [name for name, _ in sources_of(names)]
        self.reading, self.cased = reading, cased

    def __iter__(self) -> Iterator[list[str]]:
        for source in self.sources:
            for text in texts_of(source, self.reading):
                for line in (line for piece in pieces(text) for line in piece.splitlines()):
                    words = WORD.findall(line if self.cased else line.lower())
                    if words:
                        yield words


def train_word_vectors(
    names: Sequence[str], out: Path, settings: VectorSettings, reading: Settings
) -> tuple[int, int]:
    """Train vectors on texts, write them in word2vec's binary format, and return (vectors, words read).

    Raises `InputError` without gensim, for texts without frequent words, and for a file that cannot be
    written.
    """
    with needs_extra("vectors", "data vectors: skip-gram and CBOW are trained by gensim"):
        from gensim.models import Word2Vec  # type: ignore[import-untyped]
    sentences = Sentences(names, reading, settings.cased)
    model: Any = Word2Vec(
        vector_size=settings.width,
        window=settings.window,
        min_count=settings.least,
        sg=int(settings.algorithm == "skipgram"),
        seed=settings.seed,
        workers=settings.workers,
    )
    model.build_vocab(sentences)
    if not len(model.wv):
        raise InputError(
            f"FILES: no word occurs {settings.least} times or more; name longer texts or lower --least"
        )
    model.train(sentences, total_examples=model.corpus_count, epochs=settings.epochs)
    atomic_write(out, lambda path: model.wv.save_word2vec_format(str(path), binary=True))
    return len(model.wv), int(model.corpus_total_words)
