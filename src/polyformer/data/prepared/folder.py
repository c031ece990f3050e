"""A finished folder of prepared text: its splits, each a memory-mapped sequence of documents."""

from collections.abc import Iterator
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
                f"{folder}: not finished; go on by the same polyformer data prepare ... --out {folder}"
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
