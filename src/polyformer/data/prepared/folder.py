"""A finished folder of prepared text: its splits, each a memory-mapped sequence of documents."""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import numpy as np

from polyformer.core.errors import InputError
from polyformer.data.prepared.manifest import TOKENIZER, Manifest
from polyformer.data.prepared.shards import check_content, check_sizes, damaged, mapped, shard_files
from polyformer.data.tokenizer import Tokenizer
from polyformer.data.tokenizer_loading import load_tokenizer


class PreparedFolder:
    """A folder finished by `polyformer data prepare`.

    Raises `InputError` for any other folder, and for files that are missing or have another size.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.manifest = Manifest.read(self.folder)
        if self.manifest.place is not None:
            raise InputError(
                f"{folder}: not finished; resume by the same polyformer data prepare ... --out {folder}"
            )
        check_sizes(self.folder, self.manifest)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the tokens."""
        tokenizer = load_tokenizer(self.folder / TOKENIZER)
        if tokenizer.fingerprint != self.manifest.settings.tokenizer:
            raise InputError(
                f"{self.folder / TOKENIZER}: not the tokenizer that made the tokens; put back that one"
            )
        return tokenizer

    def split(self, name: str) -> "PreparedSplit | None":
        """Return the documents of "train" or "validation"; None if there are none."""
        split = PreparedSplit(self, name)
        return split if len(split) else None

    def verify(self) -> None:
        """Compare all files with their checksums; raises `InputError` for the first file that differs."""
        assert self.tokenizer
        for shard in self.manifest.shards:
            check_content(self.folder, shard)


class PreparedSplit:
    """The documents of a split, in the order of the sources, as token ids without special tokens."""

    def __init__(self, source: PreparedFolder, name: str):
        self.source, self.name = source, name
        self.shards = source.manifest.of(name)
        self.token_starts = np.cumsum([0, *(shard.tokens for shard in self.shards)])
        """The number of each shard's first token, and of all tokens."""
        self.starts = np.cumsum([0, *(shard.documents for shard in self.shards)])
        """The number of each shard's first document, and of all documents."""
        self._mapped = cache(self._map)  # maps each shard only when it is read

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, number: int) -> np.ndarray:
        if not 0 <= number < len(self):
            raise IndexError(number)
        shard = int(np.searchsorted(self.starts, number, "right")) - 1
        tokens, ends = self.arrays(shard)
        place = number - int(self.starts[shard])
        return self.checked(tokens[int(ends[place - 1]) if place else 0 : int(ends[place])], shard)

    def __iter__(self) -> Iterator[np.ndarray]:
        for shard in range(len(self.shards)):
            tokens, ends = self.arrays(shard)
            start = 0
            for end in ends:
                yield self.checked(tokens[start : int(end)], shard)
                start = int(end)

    @property
    def tokens(self) -> int:
        """Return the number of tokens."""
        return int(self.token_starts[-1])

    @property
    def counts(self) -> dict[str, float]:
        """Return words and bytes of the text for a language model's metrics; {} if tokenization was lossy."""
        if not self.shards or self.name == "train" or not all(shard.lossless for shard in self.shards):
            return {}
        return {name: sum(getattr(shard, name) for shard in self.shards) for name in ("words", "bytes")}

    def arrays(self, shard: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (tokens, ends) of a shard, memory-mapped."""
        return self._mapped(shard)

    def checked(self, ids: np.ndarray, shard: int) -> np.ndarray:
        """Return `ids` that were read from a shard; raises `InputError` for an id outside the vocabulary."""
        manifest = self.source.manifest
        if len(ids) and int(ids.max()) >= manifest.vocab_size:
            path = shard_files(self.source.folder, self.shards[shard])[0]
            raise damaged(path, f"has the token {int(ids.max())}, and the vocabulary {manifest.vocab_size}")
        return ids

    def _map(self, shard: int) -> tuple[np.ndarray, np.ndarray]:
        return mapped(self.source.folder, self.source.manifest, self.shards[shard])


@dataclass(frozen=True, eq=False)
class FramedText:
    """All documents of a split end to end, read from any position.

    The tokens `before` (b) and `behind` (e) each document are not in the files:

        b d0 d0 d0 e b d1 e b d2 d2 e
        0            5      8
    """

    split: PreparedSplit
    before: int
    behind: int

    def __len__(self) -> int:
        return self.split.tokens + 2 * len(self.split)

    @cached_property
    def shard_starts(self) -> np.ndarray:
        """Return the start of each shard, and the end of the last: [shards + 1]."""
        return self.split.token_starts + 2 * self.split.starts

    def starts(self, step: int = 1) -> np.ndarray:
        """Return the starts of documents 0, step, 2 step, ..., and the end of the last document."""
        starts = []
        for shard, first in enumerate(self.split.starts[:-1].tolist()):
            ends = self.split.arrays(shard)[1]
            numbers = np.arange(-first % step, len(ends), step)
            before = np.where(numbers > 0, ends[numbers - 1], 0).astype(np.int64)
            starts.append(self.shard_starts[shard] + before + 2 * numbers)
        return np.concatenate([*starts, [len(self)]])

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (document number, int64 token ids) of each document, or part of it, between two positions."""
        if start >= stop:
            return
        shard = int(np.searchsorted(self.shard_starts, start, "right")) - 1
        ends = self.split.arrays(shard)[1]
        within = start - int(self.shard_starts[shard])
        number = bisect.bisect_right(range(len(ends)), within, key=lambda i: int(ends[i]) + 2 * (i + 1))
        while start < stop:
            tokens, ends = self.split.arrays(shard)
            first, last = int(ends[number - 1]) if number else 0, int(ends[number])
            begin = int(self.shard_starts[shard]) + first + 2 * number
            after = min(stop, begin + last - first + 2)
            ids = tokens[max(first, first + start - begin - 1) : min(last, first + after - begin - 1)]
            parts = [self.split.checked(ids, shard).astype(np.int64)]
            if start == begin:
                parts.insert(0, np.array([self.before]))
            if after == begin + last - first + 2:
                parts.append(np.array([self.behind]))
            yield int(self.split.starts[shard]) + number, np.concatenate(parts)
            start, number = after, number + 1
            if number == len(ends):
                shard, number = shard + 1, 0
