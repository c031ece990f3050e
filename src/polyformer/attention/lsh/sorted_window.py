"""Windows in a sorted order: a token attends to the last keys of its own bucket, and to no later ones.

Tokens are sorted by (document, bucket, slot). In that order the last m keys of a bucket at or before a token
are a window of m places that ends at the token's own and does not cross into another bucket. One subtraction
decides this where buckets are set apart by m - 1 empty places:

    spot_t = place of t + (m - 1) * (number of buckets before t's) i attends to j    if 0 <= spot_i - spot_j <
    m    (causal),    |spot_i - spot_j| < m    (otherwise: m - 1 keys of the bucket before the token, itself,
    m - 1 after it)

The edges of chunks of the sorted order, the published form (Kitaev et al. 2020, section 3), depend on later
tokens; what a token attends to here depends on the tokens at or before it alone. A padding token is a bucket
of its own: it attends to itself. Cost: one stable sort of B H R T numbers.
"""

import dataclasses

import torch
from torch import Tensor

from polyformer.sequence.context import Context


@dataclasses.dataclass(frozen=True, eq=False)
class Windows:
    """R independent sortings (rounds) of the T tokens of each head.

    Args:
        order: [B, H, R, T], the slots in sorted order.
        spots: [B, H, R, T], the spot of every slot (not in sorted order).
        size: m, which counts the token itself.
        causal: whether keys after the token are out of the window.
    """

    order: Tensor
    spots: Tensor
    size: int
    causal: bool

    def sees(self, query_spots: Tensor, key_spots: Tensor) -> Tensor:
        """Whether queries on these spots attend to keys on those, which broadcast."""
        apart = query_spots - key_spots
        return (apart >= 0) & (apart < self.size) if self.causal else apart.abs() < self.size


@torch.no_grad()
def bucket_windows(buckets: Tensor, size: int, context: Context) -> Windows:
    """The windows of `size` keys in buckets [B, H, R, T] of all T keys of `context`.

    Documents and padding are those of the context's keys; numbers of buckets may be any from 0 on.
    """
    length = buckets.shape[-1]
    flat = buckets.reshape(-1, length).long()
    rows = torch.arange(len(flat), device=flat.device).unsqueeze(1)
    valid = _by_row(context.kv_valid, buckets)
    if valid is not None:  # padding comes last
        flat = flat.masked_fill(~valid, int(flat.max()) + 1)
    # One sort of one long row: torch sorts that by radix. Documents do not decrease along a row, so that a
    # stable sort by bucket keeps those of one bucket together.
    keys = (flat + rows * (int(flat.max()) + 1)).flatten()
    small = torch.int32 if int(keys[-length:].max()) < 2**31 else torch.int64
    order = keys.to(small).sort(stable=True).indices.view_as(flat) - rows * length
    starts = torch.ones_like(flat, dtype=torch.bool)
    in_order = flat.gather(1, order)
    starts[:, 1:] = in_order[:, 1:] != in_order[:, :-1]
    documents = _by_row(context.kv_doc, buckets)
    if documents is not None:
        in_order = documents.gather(1, order)
        starts[:, 1:] |= in_order[:, 1:] != in_order[:, :-1]
    if valid is not None:
        starts |= ~valid.gather(1, order)
    spots = torch.arange(length, device=flat.device) + (size - 1) * (starts.cumsum(1) - 1)
    spots = torch.empty_like(spots).scatter_(1, order, spots)
    return Windows(order.view_as(buckets), spots.view_as(buckets), size, context.causal)


def _by_row(table: Tensor | None, buckets: Tensor) -> Tensor | None:
    """A table [B, T] of the context for each of the B H R rows."""
    if table is None:
        return None
    return table.view(-1, 1, 1, table.shape[-1]).expand_as(buckets).reshape(-1, table.shape[-1])
