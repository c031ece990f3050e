"""Intervals of keys in sorted order: each query attends to an interval, and the intervals only move forward.

Queries and keys are sorted separately, by (row, document, cluster, slot). The last w keys of a query's
cluster at or before it are then consecutive, and neighbouring queries attend to nearly the same keys.
"""

import dataclasses

import torch
from torch import Tensor

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
        alone: whether a query attends to the key in its own slot only if it sees no other.
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
    if context.kv_doc is not None:  # numbered by their first slots
        doc = context.kv_doc[:, slots].contiguous()
        starts = torch.searchsorted(context.kv_doc.contiguous(), doc)
        group = group * context.kv_len + starts.unsqueeze(1)
    group = group * count + clusters
    real = len(group.view(-1))
    if context.kv_valid is not None:
        valid = context.kv_valid[:, slots].bool()
        group = group.masked_fill(~valid.unsqueeze(1), int(group.max()) + 1)
        real = heads * int(valid.sum())
    # torch sorts one long row of integers by radix, faster for a smaller dtype.
    small = group.to(torch.int32) if int(group.max()) < 2**31 else group
    order = small.flatten().sort(stable=True).indices[:real]
    place = torch.arange(rows * length * heads, device=clusters.device).view(rows, length, heads)
    return place.transpose(1, 2).flatten()[order], (group * context.kv_len + slots).flatten()[order]
