"""A store of (key, value) for each row of a batch: first in, first out, of one document a row.

The rows' entries lie one after another in a buffer with room behind them, so that an append costs O(1) per
token: when it is full, what is kept moves to the front of another, at most twice as large as that.
"""

import dataclasses
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from polyformer.core.state import State
from polyformer.sequence.context import Context

FIRST_CAPACITY = 64


@dataclasses.dataclass(frozen=True)
class Window:
    """What the first `queries` of a row's queries see: the entries start <= i < stop."""

    start: int
    stop: int
    queries: int


@dataclasses.dataclass(frozen=True)
class Store(State):
    """Keys and values [B, Hkv, C, D], of which row b has filled first[b] <= i < end[b].

    first, end: [B]. document: [B], the number of the document that the entries are of; None where documents
    have no numbers. A store is a value, as a key-value cache is: `high_water`, up to where each row of the
    buffer is filled, tells when a second continuation must copy.
    """

    keys: Tensor | None = None
    values: Tensor | None = None
    first: Tensor | None = None
    end: Tensor | None = None
    document: Tensor | None = None
    high_water: list[int] = dataclasses.field(default_factory=list)

    @torch.no_grad()
    def append(self, keys: Tensor, values: Tensor, context: Context, keep: int) -> "Store":
        """With the new tokens' keys and values [B, Hkv, T, D], those that `context` has as queries; of each
        row the last `keep` entries of its last document stay. Padding is left out."""
        rows, _, new, _ = keys.shape
        zeros = torch.zeros(rows, dtype=torch.long, device=keys.device)
        store = self._of_last_document(context, zeros)
        taken = store._taken(context)
        counts = [new] * rows if taken is None else taken.sum(1).tolist()
        store = store._with_room(keys, values, [min(count, keep) for count in counts], keep)
        assert store.end is not None
        ends = []
        for row, (begin, count) in enumerate(zip(store.end.tolist(), counts)):
            stop = begin + min(count, keep)
            for buffer, added in ((store.keys, keys), (store.values, values)):
                assert buffer is not None
                own = added[row] if taken is None or count == new else added[row, :, taken[row]]
                buffer[row, :, begin:stop] = own[:, own.shape[1] - (stop - begin) :]
            ends.append(stop)
        store.high_water[:] = ends
        end = torch.tensor(ends, device=keys.device)
        assert store.first is not None
        return dataclasses.replace(store, end=end, first=torch.maximum(store.first, end - keep))

    def windows(self, context: Context, size: int) -> list[Window]:
        """What each row's queries see of its last `size` entries that attention does not reach itself.

        The keys that `context` has before its first query are the memory's, and the last entries of the store
        are of the same tokens. Queries of a later document see nothing.
        """
        if self.first is None or self.end is None:
            return []
        past = context.kv_len - context.q_len
        near = torch.full_like(self.end, past)
        queries = torch.full_like(self.end, context.q_len)
        reached = None if context.kv_valid is None else context.kv_valid[:, :past]
        if context.kv_doc is not None and context.q_doc is not None:
            document = (torch.zeros_like(self.end) if self.document is None else self.document).unsqueeze(1)
            same = context.kv_doc[:, :past] == document
            reached = same if reached is None else reached & same
            queries = (context.q_doc == document).sum(1)
        if reached is not None:
            near = reached.sum(1)
        stop = torch.maximum(self.first, self.end - near)
        start = torch.maximum(self.first, stop - size)
        return [Window(*row) for row in torch.stack([start, stop, queries], 1).tolist()]

    def compact(self) -> Self:
        """As for every state: without what was dropped, and without room to spare."""
        if self.keys is None or self.values is None:
            return self
        return self._moved(self.keys, self.values, max(self._lengths(), default=0))

    def _of_last_document(self, context: Context, zeros: Tensor) -> "Store":
        """Without the entries of a document that is over; zeros: [B]."""
        first = zeros if self.first is None else self.first
        end = zeros if self.end is None else self.end
        if context.q_doc is None:
            return dataclasses.replace(self, first=first, end=end)
        document = context.q_doc[:, -1]
        before = zeros if self.document is None else self.document
        first = torch.where(document == before, first, end)
        return dataclasses.replace(self, first=first, end=end, document=document.clone())

    def _taken(self, context: Context) -> Tensor | None:
        """Which new tokens enter, [B, T] bool: the real ones of the row's last document; None for all."""
        taken = None if context.kv_valid is None else context.kv_valid[:, -context.q_len :]
        if context.q_doc is not None and self.document is not None:
            last = context.q_doc == self.document.unsqueeze(1)
            taken = last if taken is None else taken & last
        return None if taken is None or bool(taken.all()) else taken

    def _with_room(self, keys: Tensor, values: Tensor, counts: list[int], keep: int) -> "Store":
        """This store, or a copy in another buffer when it is full or its next slots are somebody else's."""
        assert self.end is not None
        ends = self.end.tolist()
        if self.keys is not None and self.high_water == ends:
            filled = max((end + count for end, count in zip(ends, counts)), default=0)
            if filled <= self.keys.shape[2]:
                return self
        lengths = [min(length, keep) for length in self._lengths()]
        needed = max((length + count for length, count in zip(lengths, counts)), default=0)
        capacity = max(2 * needed if self.keys is not None else needed, FIRST_CAPACITY)
        return self._moved(keys, values, capacity, lengths)

    def _moved(self, keys: Tensor, values: Tensor, capacity: int, lengths: list[int] | None = None) -> Self:
        """The last entries of each row, by default all, at the front of buffers like keys and values."""
        assert self.end is not None
        lengths = self._lengths() if lengths is None else lengths
        new = [x.new_zeros(*x.shape[:2], capacity, x.shape[3]) for x in (keys, values)]
        for buffer, old in zip(new, (self.keys, self.values)):
            for row, (end, length) in enumerate(zip(self.end.tolist(), lengths)):
                if old is not None and length:
                    buffer[row, :, :length] = old[row, :, end - length : end]
        end = torch.tensor(lengths, device=keys.device)
        first = torch.zeros_like(end)
        return dataclasses.replace(
            self, keys=new[0], values=new[1], first=first, end=end, high_water=list(lengths)
        )

    def _lengths(self) -> list[int]:
        """How many entries each row has."""
        assert self.first is not None
        assert self.end is not None
        return (self.end - self.first).tolist()

    def _each(self, on_tensor: Callable[[Tensor], Tensor], on_state: Callable[[State], State]) -> Self:
        """As for every state; a copy in a buffer of its own has a high-water mark of its own too."""
        changed = super()._each(on_tensor, on_state)
        if self.keys is None or changed.keys is None or changed.end is None:
            return changed
        if changed.keys.data_ptr() == self.keys.data_ptr() and len(changed.keys) == len(self.keys):
            return changed
        return dataclasses.replace(changed, high_water=changed.end.tolist())
