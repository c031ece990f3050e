"""A store of (key, value) pairs for each row of a batch, and the exact search for the nearest keys.

The search:

    q [H, R, D], keys [H, N, D]  ->  products [H, R, k] and places [H, R, k] of the k largest, largest first

    plain    all R x N products at once: the definition
    tiled    the same, with at most a tile of products in memory
    faiss    the same by faiss.knn, in float32

k is `count`, or N if there are fewer keys. Products are at least in float32. Among equal products the choice
is arbitrary.

The store is first in, first out, from a single document per row. The rows' entries are contiguous in a buffer
with free capacity at its end, so that an append costs O(1) per token: if the buffer is full, the kept entries
move to the start of a new buffer of at most twice their size.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, Self

import torch
from torch import Tensor

from polyformer.core.imports import needs_extra
from polyformer.core.ops.autograd import at_least_float32
from polyformer.core.ops.product_kernels import product
from polyformer.core.sequence.context import Context
from polyformer.core.state import State

Search = Literal["tiled", "plain", "faiss"]
Matches = tuple[Tensor, Tensor]

TILE_QUERIES, TILE_KEYS = 128, 32768
"""The size of a tile of products, 16 MiB. Wide tiles need fewer groups in total."""

SMALLEST_GROUP = 4
"""The smallest group size that saves time; smaller groups have nearly as much to search as all products."""


def search_plain(q: Tensor, keys: Tensor, count: int) -> Matches:
    """Return the largest of all products."""
    q, keys = at_least_float32(q), at_least_float32(keys)
    return _values_and_indices((q @ keys.mT).topk(min(count, keys.shape[1])))


def search_tiled(q: Tensor, keys: Tensor, count: int) -> Matches:
    """Return the largest products, computed in tiles of the keys and merged with the largest so far."""
    heads, queries, number = *q.shape[:2], keys.shape[1]
    # All products fit into one tile.
    if heads * queries * number <= TILE_QUERIES * TILE_KEYS:
        scores, places = _topk(product(at_least_float32(q), at_least_float32(keys).mT).flatten(0, 1), count)
        return scores.unflatten(0, (heads, queries)), places.unflatten(0, (heads, queries))
    tiles = [
        [_topk_tiled(some, keys[head], count) for some in q[head].split(TILE_QUERIES)]
        for head in range(heads)
    ]
    scores, places = (torch.stack([torch.cat([pair[i] for pair in row]) for row in tiles]) for i in range(2))
    return scores, places


def _topk_tiled(q: Tensor, keys: Tensor, count: int) -> Matches:
    """Return the largest products of a head: q [R, D], keys [N, D] -> [R, k] each."""
    q, number = at_least_float32(q), len(keys)
    scores, places = q.new_empty(len(q), 0), torch.empty(len(q), 0, dtype=torch.long, device=q.device)
    for start in range(0, number, TILE_KEYS):
        tile = at_least_float32(keys[start : start + TILE_KEYS])
        new, columns = _topk(product(q.unsqueeze(0), tile.T.unsqueeze(0)).squeeze(0), count)
        scores, places = torch.cat([scores, new], 1), torch.cat([places, columns + start], 1)
        # The k largest of all tiles so far: [R, k + k] -> [R, k].
        scores, order = scores.topk(min(count, scores.shape[1]))
        places = places.gather(1, order)
    return scores, places


def _topk(scores: Tensor, count: int) -> Matches:
    """Return the largest of scores [R, W], [R, k] each.

    Each of the k largest elements is in one of the k groups with the largest maxima (otherwise k other
    elements would be at least as large). Only these groups are searched: W / size maxima and k size members.
    """
    rows, width = scores.shape
    size = math.isqrt(width // count)
    if size < SMALLEST_GROUP:
        return _values_and_indices(scores.topk(min(count, width)))
    groups = width // size
    full_groups = groups * size
    members = scores[:, :full_groups].view(rows, size, groups)  # groups of columns `groups` apart
    # Groups are strided, so that maxima of neighbouring groups are computed together as vectors.
    best = members.amax(1).topk(count, sorted=False).indices
    columns = best.unsqueeze(1) + groups * torch.arange(size, device=scores.device).unsqueeze(1)
    columns = columns.flatten(1)
    if full_groups < width:
        rest = torch.arange(full_groups, width, device=scores.device).expand(rows, -1)
        columns = torch.cat([columns, rest], 1)
    largest, order = scores.gather(1, columns).topk(count)
    return largest, columns.gather(1, order)


def search_faiss(q: Tensor, keys: Tensor, count: int) -> Matches:
    """Return the result of faiss.knn for every head, on the CPU."""
    faiss = _faiss()
    heads = zip(*(x.float().cpu().contiguous().numpy() for x in (q, keys)))
    best = [faiss.knn(*pair, min(count, keys.shape[1]), metric=faiss.METRIC_INNER_PRODUCT) for pair in heads]
    scores, places = (torch.stack([torch.from_numpy(pair[i]) for pair in best]) for i in range(2))
    return scores.to(q.device, at_least_float32(q[:0]).dtype), places.to(q.device)


def gather_entries(vectors: Tensor, places: Tensor) -> Tensor:
    """Return the vectors [H, N, D] at places [H, R, k]: [H, R, k, D]."""
    near = [own.index_select(0, some.flatten()) for own, some in zip(vectors, places)]
    return torch.stack(near).unflatten(1, places.shape[1:])


def _faiss() -> Any:
    """Return the module; raises `InputError` with the way to install it."""
    with needs_extra("datastore", "memory.search: faiss is not installed", "or take search='tiled'"):
        import faiss
    return faiss


def _values_and_indices(best: torch.return_types.topk) -> Matches:
    return best.values, best.indices


SEARCHES: dict[str, Callable[[Tensor, Tensor, int], Matches]] = {
    "tiled": search_tiled,
    "plain": search_plain,
    "faiss": search_faiss,
}


FIRST_CAPACITY = 64


@dataclasses.dataclass(frozen=True)
class StoreWindow:
    """The entries start <= i < stop, which the first `queries` of a row's queries see."""

    start: int
    stop: int
    queries: int


@dataclasses.dataclass(frozen=True)
class Store(State):
    """Keys and values [B, Hkv, C, D]; row b has the entries first[b] <= i < end[b].

    first, end: [B]. document: [B], the number of the entries' document; None if documents have no numbers. A
    store is immutable, like a KV cache: `high_water`, the end of the used part of each row of the buffer,
    shows when a second continuation must copy the buffer.
    """

    keys: Tensor | None = None
    values: Tensor | None = None
    first: Tensor | None = None
    end: Tensor | None = None
    document: Tensor | None = None
    high_water: list[int] = dataclasses.field(default_factory=list)

    @torch.no_grad()
    def append(self, keys: Tensor, values: Tensor, context: Context, keep: int) -> "Store":
        """Return the store with the new tokens' keys and values [B, Hkv, T, D], the queries of `context`.

        Each row keeps the last `keep` entries of its last document. Padding is left out. If keys are on the
        meta device, counts are on the CPU, as they do not depend on values.
        """
        rows, _, new, _ = keys.shape
        zeros = torch.zeros(rows, dtype=torch.long, device="cpu" if keys.is_meta else keys.device)
        store = self._of_last_document(context, zeros)
        mask = store._stored_mask(context)
        # Rows may take different numbers of tokens, as padding and earlier documents are left out.
        counts = [new] * rows if mask is None else mask.sum(1).tolist()
        store = store._with_capacity(keys, values, [min(count, keep) for count in counts], keep)
        assert store.end is not None
        ends = []
        for row, (begin, count) in enumerate(zip(store.end.tolist(), counts)):
            stop = begin + min(count, keep)
            for buffer, added in ((store.keys, keys), (store.values, values)):
                assert buffer is not None
                own = added[row] if mask is None or count == new else added[row, :, mask[row]]
                buffer[row, :, begin:stop] = own[:, own.shape[1] - (stop - begin) :]
            ends.append(stop)
        store.high_water[:] = ends
        end = torch.tensor(ends, device=zeros.device)
        assert store.first is not None
        return dataclasses.replace(store, end=end, first=torch.maximum(store.first, end - keep))

    def windows(self, context: Context, size: int) -> list[StoreWindow]:
        """Return for each row the last `size` entries that its attention does not reach.

        The keys that `context` has before its first query belong to the memory, and the last entries of the
        store are the same tokens. Queries of a later document see no entries.
        """
        if self.first is None or self.end is None:
            return []
        # The number of keys before the first query: the slots of the memory.
        past = context.kv_len - context.q_len
        num_in_memory = torch.full_like(self.end, past)
        queries = torch.full_like(self.end, context.q_len)
        in_memory = None if context.kv_valid is None else context.kv_valid[:, :past]
        if context.kv_doc is not None and context.q_doc is not None:
            document = (torch.zeros_like(self.end) if self.document is None else self.document).unsqueeze(1)
            same = context.kv_doc[:, :past] == document
            in_memory = same if in_memory is None else in_memory & same
            queries = (context.q_doc == document).sum(1)
        if in_memory is not None:
            num_in_memory = in_memory.sum(1)
        # Entries that attention reaches are the last ones, and are left out.
        stop = torch.maximum(self.first, self.end - num_in_memory)
        start = torch.maximum(self.first, stop - size)
        return [StoreWindow(*row) for row in torch.stack([start, stop, queries], 1).tolist()]

    def compact(self) -> Self:
        """Return the store without dropped entries and free capacity."""
        if self.keys is None or self.values is None:
            return self
        return self._copied(self.keys, self.values, max(self._lengths(), default=0))

    def _of_last_document(self, context: Context, zeros: Tensor) -> "Store":
        """Return the store without the entries of a document that has ended; zeros: [B]."""
        first = zeros if self.first is None else self.first
        end = zeros if self.end is None else self.end
        if context.q_doc is None:
            return dataclasses.replace(self, first=first, end=end)
        document = context.q_doc[:, -1]
        before = zeros if self.document is None else self.document
        # A new document begins: all entries of the old one are dropped.
        first = torch.where(document == before, first, end)
        return dataclasses.replace(self, first=first, end=end, document=document.clone())

    def _stored_mask(self, context: Context) -> Tensor | None:
        """Return which new tokens are stored, [B, T] bool: the last document's real tokens; None for all."""
        mask = None if context.kv_valid is None else context.kv_valid[:, -context.q_len :]
        if context.q_doc is not None and self.document is not None:
            last = context.q_doc == self.document.unsqueeze(1)
            mask = last if mask is None else mask & last
        return None if mask is None or bool(mask.all()) else mask

    def _with_capacity(self, keys: Tensor, values: Tensor, counts: list[int], keep: int) -> "Store":
        """Return this store, or a copy in a new buffer if it is full or its next slots are in use."""
        assert self.end is not None
        ends = self.end.tolist()
        if self.keys is not None and self.high_water == ends:
            filled = max((end + count for end, count in zip(ends, counts)), default=0)
            if filled <= self.keys.shape[2]:
                return self
        lengths = [min(length, keep) for length in self._lengths()]
        needed = max((length + count for length, count in zip(lengths, counts)), default=0)
        # Doubling makes an append O(1) per token on average.
        capacity = max(2 * needed if self.keys is not None else needed, FIRST_CAPACITY)
        return self._copied(keys, values, capacity, lengths)

    def _copied(self, keys: Tensor, values: Tensor, capacity: int, lengths: list[int] | None = None) -> Self:
        """Return the last entries of each row, by default all, at the start of new buffers."""
        assert self.end is not None
        lengths = self._lengths() if lengths is None else lengths
        new = [x.new_zeros(*x.shape[:2], capacity, x.shape[3]) for x in (keys, values)]
        for buffer, old in zip(new, (self.keys, self.values)):
            for row, (end, length) in enumerate(zip(self.end.tolist(), lengths)):
                if old is not None and length:
                    buffer[row, :, :length] = old[row, :, end - length : end]
        # Entries now start at 0 in every row.
        end = torch.tensor(lengths, device=self.end.device)
        first = torch.zeros_like(end)
        return dataclasses.replace(
            self, keys=new[0], values=new[1], first=first, end=end, high_water=list(lengths)
        )

    def _lengths(self) -> list[int]:
        """Return the number of entries in each row."""
        assert self.first is not None
        assert self.end is not None
        return (self.end - self.first).tolist()

    def _each(self, on_tensor: Callable[[Tensor], Tensor], on_state: Callable[[State], State]) -> Self:
        """Apply the functions to all parts; a copy in another buffer gets a new high-water mark."""
        copied = super()._each(on_tensor, on_state)
        if self.keys is None or copied.keys is None or copied.end is None:
            return copied
        if copied.keys.data_ptr() == self.keys.data_ptr() and len(copied.keys) == len(self.keys):
            return copied
        return dataclasses.replace(copied, high_water=copied.end.tolist())
