"""All documents of a split end to end, each between two special tokens, read from any position.

b d0 d0 d0 e b d1 e b d2 d2 e        b: the token before a document, e: the token after it
0            5      8
"""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from polyformer.data.prepared.folder import PreparedSplit


@dataclass(frozen=True, eq=False)
class FramedText:
    """A split with the tokens `before` and `behind` each document, which the files do not contain."""

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
