"""Rows of prepared text: of a folder or several, packed and shuffled, or documents in order.

A mixture is a YAML file of folders, relative to the file or absolute, and their weights: proportional shares
of the rows that training reads.

    books: 0.7
    ../web: 0.3

The shuffled order is computed instead of stored. It is a function of (seed, epoch), and a batch a function of
its number: a run resumes in the middle of an epoch immediately, and each process reads only the rows of its
batches. Several texts are mixed as in `polyformer.data.rows`: each is read in a separate order,
drawn anew when it is used up.

Documents in order are read as in `polyformer.data.rows.packing`, without an epoch in memory.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polyformer.core.errors import InputError, quote
from polyformer.core.files import read_bounded
from polyformer.core.parsing import parse_yaml
from polyformer.core.ranges import YAML_BYTES
from polyformer.data.prepared import MANIFEST, FramedText, PreparedFolder, PreparedSplit, is_prepared
from polyformer.data.rows import (
    CORRUPTION,
    ORDER,
    Batch,
    Collate,
    Corrupt,
    Position,
    Row,
    share_of_epoch,
)
from polyformer.data.rows.packing import IGNORED, packed_row
from polyformer.data.tokenizers import load_tokenizer
from polyformer.data.tokenizers.tokenizer import Tokenizer, TokenizerConfig

MIXTURES = (".yaml", ".yml")


class PreparedText:
    """The documents of the same split of folders, drawn by `weights`; a row is {text, input_ids}.

    The tokens contain no special tokens; the text is their decoding.
    """

    def __init__(self, parts: Sequence[PreparedSplit], weights: Sequence[float]):
        self.parts = tuple(parts)
        self.rates = [weight / sum(weights) for weight in weights]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for part in self.parts:
            for ids in part:
                yield {"text": self.tokenizer.decode(ids.tolist()), "input_ids": ids}

    @property
    def name(self) -> str:
        """Return its name in messages."""
        return ", ".join(str(part.source.folder) for part in self.parts)

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the tokens."""
        return self.parts[0].source.tokenizer

    def tokenizer_for(self, config: TokenizerConfig) -> Tokenizer:
        """Return the tokenizer of a new run; raises `InputError` if `config` names another tokenizer."""
        if config.path is not None:
            self.check_tokenizer(load_tokenizer(config.path), f"tokenizer.path: {config.path}")
        return self.tokenizer

    def check_tokenizer(self, tokenizer: Tokenizer, name: str) -> None:
        """Raise `InputError` if `tokenizer`, called `name` in messages, did not produce the tokens."""
        if tokenizer.fingerprint != self.tokenizer.fingerprint:
            raise InputError(
                f"{name}: not the tokenizer that {self.name} was prepared with ({len(tokenizer):,} tokens, "
                f"there {len(self.tokenizer):,}); prepare it again by polyformer data prepare --tokenizer"
            )

    @property
    def counts(self) -> dict[str, float]:
        """Return words and bytes of the text, if they are known for all parts."""
        counts = [part.counts for part in self.parts]
        return (
            {name: sum(part[name] for part in counts) for name in ("words", "bytes")} if all(counts) else {}
        )


def is_prepared_source(path: str | None) -> bool:
    """Return whether `path` is a folder of prepared text, or a mixture of such folders."""
    return path is not None and (is_prepared(path) or _is_mixture(path))


def prepared_files(path: str) -> list[Path]:
    """Return the files that show changes of prepared text: manifests, with all checksums, and the mixture."""
    mixture = [] if is_prepared(path) else [Path(path)]
    return [*mixture, *(folder / MANIFEST for folder in weighted_folders(path))]


def open_prepared(path: str, split: str) -> PreparedText | None:
    """Open a split of the folder, or of the mixture, `path`; None if the split does not exist.

    Raises `InputError` for an unfinished or damaged folder, and for parts with different tokenizers.
    """
    folders = weighted_folders(path)
    parts = [(PreparedFolder(folder).split(split), weight) for folder, weight in folders.items()]
    there = [(part, weight) for part, weight in parts if part is not None]
    if not there:
        return None
    text = PreparedText([part for part, _ in there], [weight for _, weight in there])
    for part in text.parts:
        text.check_tokenizer(part.source.tokenizer, f"{path}: {part.source.folder}")
    return text


def _is_mixture(path: str) -> bool:
    return path.endswith(MIXTURES) and Path(path).is_file()


def weighted_folders(path: str) -> dict[Path, float]:
    """Return the folders of a mixture with their weights, in order; only `path` if it is not a mixture.

    Raises `InputError` for an invalid mixture.
    """
    return _weights(Path(path)) if _is_mixture(path) else {Path(path): 1.0}


def _weights(path: Path) -> dict[Path, float]:
    try:
        tree = parse_yaml(read_bounded(path, YAML_BYTES).decode("utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text ({error.reason})") from error
    if not isinstance(tree, dict) or not tree:
        raise InputError(f"{path}: expected folders and weights, as in 'books: 0.7', got {quote(tree)}")
    for name, weight in tree.items():
        if not isinstance(weight, int | float) or isinstance(weight, bool) or not 0 < weight < float("inf"):
            raise InputError(f"{path}: {name}: expected a weight above 0, got {quote(weight)}")
    return {path.parent / str(name): float(weight) for name, weight in tree.items()}


_MIXED = 3  # purpose of a random stream; see polyformer.data.rows


@dataclass(frozen=True, eq=False)
class PackedText:
    """The rows of `polyformer.data.pack(documents, length, last="drop")`, each computed on access.

    A text shorter than a row is one padded row.
    """

    text: FramedText
    length: int
    pad_id: int

    def __len__(self) -> int:
        return max(len(self.text) // self.length, 1)

    def __getitem__(self, number: int) -> Row:
        if not 0 <= number < len(self):
            raise IndexError(number)
        start = number * self.length
        pieces = self.text.pieces(start, min(start + self.length, len(self.text)))
        masked = len(self.text) < self.length
        return packed_row([(ids, 0) for _, ids in pieces], self.length, self.pad_id, masked)


@dataclass(frozen=True, eq=False)
class MappedBatches:
    """Batches of `rows` rows of `parts`, drawn by `rates`; an epoch has the total number of their rows."""

    parts: Sequence[PackedText]
    rates: Sequence[float]
    rows: int
    collate: Collate
    seed: int
    corrupt: Corrupt | None = None

    def shares(self, epoch: int) -> list[range]:
        """Return the range of each part's endless order that an epoch reads."""
        size = sum(map(len, self.parts))
        return [share_of_epoch(rate, size, epoch) for rate in self.rates]

    def epoch(self, epoch: int, *, position: Sequence[int] = Position()) -> Iterator[tuple[Position, Batch]]:
        """Yield `(position after it, batch)` from `position` on, see `Batches.epoch`."""
        first = Position(*position).batch
        for number, batch in enumerate(self.batches(epoch, first, 1), first + 1):
            yield Position(0, number), batch

    def batches(self, epoch: int, first: int, step: int) -> Iterator[Batch]:
        """Yield the batches first, first + step, first + 2 step, ... of an epoch, without reading others."""
        shares = self.shares(epoch)
        ends = np.cumsum([len(share) for share in shares])
        for start in range(first * self.rows, int(ends[-1]), step * self.rows):
            places = np.arange(start, min(start + self.rows, int(ends[-1])))
            drawn = shuffled(places, int(ends[-1]), ORDER, self.seed, epoch)
            parts = np.searchsorted(ends, drawn, "right")
            stops = np.array([share.stop for share in shares])
            yield self.collate(self._rows(parts, drawn - ends[parts] + stops[parts], epoch))

    def _rows(self, parts: np.ndarray, places: np.ndarray, epoch: int) -> list[Row]:
        """Return the rows at these places of the endless orders of these parts, both [rows]."""
        turns, numbers = np.divmod(places, np.array([len(part) for part in self.parts])[parts])
        for part, turn in {*zip(parts.tolist(), turns.tolist())}:
            same = (parts == part) & (turns == turn)
            key = _MIXED, self.seed, part, turn
            numbers[same] = shuffled(numbers[same], len(self.parts[part]), *key)
        rows = [self.parts[part][number] for part, number in zip(parts.tolist(), numbers.tolist())]
        if self.corrupt is None:
            return rows
        keys = ([CORRUPTION, self.seed, epoch, *at] for at in zip(parts.tolist(), places.tolist()))
        return [self.corrupt(row, np.random.default_rng(key)) for row, key in zip(rows, keys)]


TURNS = 12


def shuffled(places: np.ndarray, count: int, *key: int) -> np.ndarray:
    """Return the items, of `count`, at these places of the order drawn by `key`, int64 like `places`.

    The order is a permutation of 0, ..., count - 1. Time and memory grow only with the size of `places`:

        x = (left, right), 2 h bits;   (left, right) <- (right, left ^ F_k(right))   for k = 1, ..., 12

    A Feistel network permutes the numbers of 2 h bits, for any F; here F is a hash of its input and the key
    of each round. To permute only n numbers, results outside go through the network again until they are
    inside ("cycle walking"): at most four passes on average, for 2^(2 h) < 4 n. Source: Luby and Rackoff
    1988; Black and Rogaway 2002 (Ciphers with arbitrary finite domains), section 3.
    """
    half = np.uint64(max(1, -(-max(count - 1, 1).bit_length() // 2)))
    low = np.uint64((1 << int(half)) - 1)
    keys = np.random.default_rng(key).integers(0, 2**64, TURNS, dtype=np.uint64)
    numbers = np.array(places, np.uint64)
    outside = np.ones(numbers.shape, bool)
    while outside.any():
        left, right = numbers[outside] >> half, numbers[outside] & low
        for turn in keys:
            left, right = right, left ^ (_hash(right + turn) & low)
        numbers[outside] = left << half | right
        outside = numbers >= np.uint64(count)
    return numbers.astype(np.int64)


def _hash(x: np.ndarray) -> np.ndarray:
    """Return the mixing function of SplitMix64 (Steele et al. 2014), modulo 2^64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


GROUPS = 2**22
"""The most entries of an epoch's order: documents, or groups of neighbouring documents."""


@dataclass(frozen=True, eq=False)
class MappedSegments:
    """The batches of `Segments(documents, length, rows, seed)`.

    With more than `GROUPS` documents, groups of neighbours are shuffled instead of documents.
    """

    text: FramedText
    length: int
    rows: int
    seed: int
    pad_id: int

    def epoch(self, epoch: int, *, position: Sequence[int] = Position()) -> Iterator[tuple[Position, Batch]]:
        """Yield `(position after it, batch)` from `position` on, see `Batches.epoch`."""
        order = _Order(self.text, self.seed, epoch)
        total = len(self.text)
        length = max(1, -(-total // self.rows))
        starts = range(0, total, length)
        first = Position(*position).batch
        for number, start in enumerate(range(first * self.length, length - 1, self.length), first + 1):
            stop = min(start + self.length, length - 1)
            rows = [self._row(order, row, min(row + length, total), start, stop) for row in starts]
            names = "input_ids", "document_ids", "shift_labels"
            yield (
                Position(0, number),
                {name: torch.from_numpy(np.stack(tables)) for name, tables in zip(names, zip(*rows))},
            )

    def _row(self, order: "_Order", row: int, end: int, start: int, stop: int) -> tuple[np.ndarray, ...]:
        """Return tokens, documents and labels of columns `start` to `stop` of the row from `row` to `end`."""
        ids, documents = np.full(stop - start + 1, self.pad_id), np.full(stop - start + 1, order.padding)
        filled = 0
        for number, piece in order.pieces(row + start, min(row + stop + 1, end)):
            ids[filled : filled + len(piece)], documents[filled : filled + len(piece)] = piece, number
            filled += len(piece)
        goes_on = (documents[1:] == documents[:-1]) & (documents[1:] != order.padding)
        return ids[:-1], documents[:-1], np.where(goes_on, ids[1:], IGNORED)


class _Order:
    """The documents of an epoch end to end, in its order; `padding` is the document number of padding."""

    def __init__(self, text: FramedText, seed: int, epoch: int):
        self.text, count = text, len(text.split)
        self.size = -(-count // GROUPS)  # documents per group
        self.group_starts = text.starts(self.size)
        groups = len(self.group_starts) - 1
        self.order = np.random.default_rng([seed, epoch]).permutation(groups)
        self.starts = np.cumsum([0, *np.diff(self.group_starts)[self.order].tolist()])
        sizes = np.minimum(self.size, count - self.size * np.arange(groups))
        self.numbers = epoch * (count + 1) + np.cumsum([0, *sizes[self.order].tolist()])
        self.padding = epoch * (count + 1) + count

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (number in the epoch, token ids) of each document, or part of it, between two positions."""
        place = int(np.searchsorted(self.starts, start, "right")) - 1
        while start < stop:
            group, end = int(self.order[place]), min(stop, int(self.starts[place + 1]))
            shift = int(self.group_starts[group]) - int(self.starts[place])
            for number, ids in self.text.pieces(start + shift, end + shift):
                yield int(self.numbers[place]) + number - group * self.size, ids
            start, place = end, place + 1
