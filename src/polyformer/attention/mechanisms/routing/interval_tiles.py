"""Intervals of keys in sorted order, and their tiles: neighbouring queries with the keys that they attend to.

Queries and keys are sorted separately, by (row, document, cluster, slot). The last w keys of a query's
cluster at or before it are then consecutive, and neighbouring queries attend to nearly the same keys.

A tile has the queries of a cluster or an even part of them; small clusters share tiles of a fixed number of
neighbours. Tiles of similar size are padded to one size and computed together, up to the size of a cache.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyformer.core.host_values import on_host
from polyformer.core.sequence.context import Context


@dataclasses.dataclass(frozen=True, eq=False)
class Intervals:
    """The interval of keys of each query, in sorted order.

    Args:
        queries: [Nq], the sorted queries as indices into [B Tq H], without padding.
        keys: [Nk], likewise into [B Tk H].
        first, last: [Nq], the places first <= place < last of `keys` that each sorted query sees; neither
            ever decreases.
        starts: the places at which the queries of a cluster begin.
        hidden: [Nq], a place inside that a query does not attend to, or -1; None if there is none.
    """

    queries: Tensor
    keys: Tensor
    first: Tensor
    last: Tensor
    starts: Tensor
    hidden: Tensor | None = None


@torch.no_grad()
def cluster_intervals(
    query_clusters: Tensor,
    key_clusters: Tensor,
    count: int,
    window: int,
    context: Context,
    skip_self: bool = False,
) -> Intervals:
    """Return the intervals of the last `window` keys of a query's cluster at or before the query.

    Without causality they also include the next `window` keys.

    Args:
        query_clusters: [B, H, Tq], clusters below `count`.
        key_clusters: [B, H, Tk], likewise.
        count: the number of clusters.
        window: the number of keys on each side.
        context: describes the queries and keys.
        skip_self: whether a query attends to the key in its own slot only if it sees no other.
    """
    length = key_clusters.shape[2]
    queries, of_query = _sort_tokens(query_clusters, count, context, context.offset)
    keys, of_key = _sort_tokens(key_clusters, count, context, 0)
    group = of_query // length
    starts = torch.ones_like(group, dtype=torch.bool)
    starts[1:] = group[1:] != group[:-1]
    cluster = group * length  # the code of slot 0
    # The place after the last key at or before the query, in sorted order.
    upto = torch.searchsorted(of_key, of_query, right=True)
    first = torch.maximum(torch.searchsorted(of_key, cluster), upto - window)
    last = upto
    if not context.causal:
        last = torch.minimum(torch.searchsorted(of_key, cluster + length), upto + window)
    hidden = None
    if skip_self and len(keys):
        own = (upto - 1).clamp_min(0)
        hidden = torch.where((of_key[own] == of_query) & (last - first > 1), own, -1)
    return Intervals(queries, keys, first, last, starts.nonzero().flatten(), hidden)


def placeholder_clusters(query_clusters: Tensor, key_clusters: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return both unchanged; on the meta device, return clusters of equal size as values on the CPU.

    The cost of attention in clusters depends on their sizes. Successive slots are in successive clusters.
    """
    if not key_clusters.is_meta:
        return query_clusters, key_clusters
    queries, length = query_clusters.shape[2], key_clusters.shape[2]
    keys = (torch.arange(length, device="cpu") % count).expand(key_clusters.shape)
    return keys[:, :, length - queries :], keys


def _sort_tokens(clusters: Tensor, count: int, context: Context, offset: int) -> tuple[Tensor, Tensor]:
    """Return the order of non-padding tokens and their codes, ascending.

    A code is (row and head, document, cluster, slot) as one number.
    """
    rows, heads, length = clusters.shape
    slots = torch.arange(offset, offset + length, device=clusters.device)
    group = torch.arange(rows * heads, device=clusters.device).view(rows, heads, 1)
    groups = rows * heads * count  # a number above all groups, known without reading a GPU
    if context.kv_doc is not None:  # numbered by their first slots
        doc = context.kv_doc[:, slots].contiguous()
        starts = torch.searchsorted(context.kv_doc.contiguous(), doc)
        group = group * context.kv_len + starts.unsqueeze(1)
        groups *= context.kv_len
    group = group * count + clusters
    real = len(group.view(-1))
    if context.kv_valid is not None:
        valid = context.kv_valid[:, offset : offset + length].bool()
        group = group.masked_fill(~valid.unsqueeze(1), groups)
        real = heads * int(on_host(context.kv_valid)[:, offset : offset + length].count_nonzero())
    # torch sorts one long row of integers by radix, faster for a smaller dtype.
    small = group.to(torch.int32) if groups < 2**31 else group
    order = small.flatten().sort(stable=True).indices[:real]
    place = torch.arange(rows * length * heads, device=clusters.device).view(rows, length, heads)
    return place.transpose(1, 2).flatten()[order], (group * context.kv_len + slots).flatten()[order]


BLOCK = 128
"""The maximum number of queries per tile.

It determines how many scores outside intervals are computed in vain, which is the same on every processor: 64
and 256 were at most a sixteenth faster, under AVX2 or AVX-512.
"""

SMALL = 32
"""Clusters with fewer queries on average share tiles."""

STEP = 8
"""Tile sizes are multiples of this."""

EXCLUSIVE, UNIFORM, MOVING = 4, 2, 1
"""Kinds of tiles: with keys of no other tile; with queries that see all keys; with first keys that differ."""


class Tiles(NamedTuple):
    """n tiles of Q queries and L keys.

    Args:
        shape: (n, Q, L).
        queries, keys: n Q and n L rows to read.
        to_queries, to_keys: the rows to write; padding writes to the row after the last.
        real: [n, Q, 1], 1 for a query and 0 for padding.
        limits: a query sees a key if `limit(place, edge)` holds for all (limit, edge) of these, with place
            [L] and edge [n, Q or 1, 1].
        exclusive: whether no other tile has any of these keys.
    """

    shape: tuple[int, int, int]
    queries: Tensor
    keys: Tensor
    to_queries: Tensor
    to_keys: Tensor
    real: Tensor
    place: Tensor
    limits: list[tuple[Callable[..., Any], Tensor]]
    exclusive: bool


@torch.no_grad()
def tiles(
    intervals: Intervals, pairs_per_group: int, q: Tensor, k: Tensor, shared: bool = True
) -> list[Tiles]:
    """Return all tiles of the rows q and k, in groups of about `pairs_per_group` pairs of a query and a key.

    shared: small clusters share tiles; otherwise every tile is of one cluster.
    """
    first, last, hidden = intervals.first, intervals.last, intervals.hidden
    if not len(first) or not len(intervals.keys):
        return []
    start = _tile_starts(intervals, shared)
    stop = torch.cat([start[1:], start.new_tensor([len(first)])])
    # Intervals only move forward: a tile's keys end with the keys of its last query.
    begin, end = first[start], last[stop - 1]
    height, width = stop - start, end - begin
    moves = first[stop - 1] > begin
    alike = (last[start] == end) & ~moves if hidden is None else torch.zeros_like(moves)
    exclusive = torch.ones_like(moves)
    # Keys are exclusive if neither neighbouring tile overlaps them.
    exclusive[1:] &= begin[1:] >= end[:-1]
    exclusive[:-1] &= end[:-1] <= begin[1:]
    kind = exclusive * EXCLUSIVE + alike * UNIFORM + moves * MOVING
    # Sort by kind, width and height in one key, so that tiles of similar size are neighbours.
    order = ((kind << 48) + (_round_up(width, 2 * STEP) << 24) + height).argsort()
    start, height, begin, width, kind = (x[order] for x in (start, height, begin, width, kind))
    # A new group begins when the pairs so far exceed another multiple of `pairs_per_group`.
    group = (kind << 48) + (_round_up(height) * _round_up(width)).cumsum(0) // pairs_per_group
    _, group, counts = group.unique_consecutive(return_inverse=True, return_counts=True)
    size = counts.new_zeros(2, len(counts))
    size = size.scatter_reduce_(1, group.expand(2, -1), _round_up(torch.stack([height, width])), "amax")
    row, at, fills = _pad_runs(start, height, size[0, group])
    _, to, spare = _pad_runs(begin, width, size[1, group])
    queries, keys = intervals.queries[at], intervals.keys[to.clamp_(0, len(intervals.keys) - 1)]
    edges = [None if x is None else (x[at] - begin[row]).to(q.dtype) for x in (last, first, hidden)]
    query_rows = queries, queries.masked_fill(fills, len(q)), (~fills).to(q.dtype), *edges
    key_rows = keys, keys.masked_fill(spare, len(k))
    shape = torch.stack([counts, *size, kind[counts.cumsum(0) - 1]], 1).tolist()
    if q.is_meta:  # intervals are numbers on the CPU
        query_rows = [None if x is None else x.to("meta") for x in query_rows]
        key_rows = [x.to("meta") for x in key_rows]
    return list(_make_tiles(shape, query_rows, key_rows))


def _pad_runs(start: Tensor, count: Tensor, room: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the indices of runs of `count` items from `start` on, each padded to `room` places.

    Returns:
        The run of each place, its index (the last item's for padding), and whether it is padding.
    """
    own = torch.arange(len(start), device=start.device).repeat_interleave(room)
    number = torch.arange(len(own), device=start.device) - (room.cumsum(0) - room)[own]
    count = count[own]
    return own, start[own] + torch.minimum(number, count - 1), number >= count


def _make_tiles(
    shape: list[list[int]], query_rows: Sequence[Tensor | None], key_rows: Sequence[Tensor]
) -> Iterator[Tiles]:
    """Split concatenated rows into groups of (tiles, queries, keys, kind)."""
    rows = [n * height for n, height, _, _ in shape], [n * width for n, _, width, _ in shape]
    parts = [[None] * len(shape) if x is None else x.split(rows[0]) for x in query_rows]
    parts += [x.split(rows[1]) for x in key_rows]
    for (n, height, width, kind), part in zip(shape, zip(*parts)):
        queries, to_queries, real, last, first, hidden, keys, to_keys = part
        edges = (torch.lt, last), (torch.ge, first if kind & MOVING else None), (torch.ne, hidden)
        limits = [(limit, x.view(n, -1, 1)) for limit, x in edges if x is not None]
        if kind & UNIFORM:
            limits = [(limit, x[:, :1]) for limit, x in limits]
        place = torch.arange(width, device=real.device, dtype=real.dtype)
        yield Tiles(
            (n, height, width),
            queries,
            keys,
            to_queries,
            to_keys,
            real.view(n, -1, 1),
            place,
            limits,
            bool(kind & EXCLUSIVE),
        )


def _tile_starts(intervals: Intervals, shared: bool) -> Tensor:
    """Return the first queries of all tiles."""
    count, starts = len(intervals.first), intervals.starts
    # Half a block of neighbours, from one or several small clusters.
    if shared and count < SMALL * len(starts):
        return torch.arange(0, count, BLOCK // 2, device=starts.device)
    sizes = torch.diff(starts, append=starts.new_tensor([count]))
    parts = (sizes + BLOCK - 1) // BLOCK
    own = torch.arange(len(starts), device=starts.device).repeat_interleave(parts)
    number = torch.arange(len(own), device=starts.device) - (parts.cumsum(0) - parts)[own]
    return starts[own] + number * sizes[own] // parts[own]


def _round_up(sizes: Tensor, step: int = STEP) -> Tensor:
    return (sizes.clamp_min(1) + step - 1) // step * step
