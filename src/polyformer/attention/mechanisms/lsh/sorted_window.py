"""Windows in a sorted order: a token attends to the last keys of its bucket, and to no later keys.

Tokens are sorted by (document, bucket, slot). In that order the last m keys of a bucket at or before a token
are a window of m places that ends at the token's own and does not cross into another bucket. One subtraction
decides this if buckets are separated by m - 1 empty places:

    spot_t = place of t + (m - 1) * (number of buckets before t's)
    i attends to j    if 0 <= spot_i - spot_j < m    (causal)
                      if |spot_i - spot_j| < m       (otherwise: m - 1 keys of the bucket before the token,
                                                     the token itself, and m - 1 keys after it)

The edges of chunks of the sorted order, the published form (Kitaev et al. 2020, section 3), depend on later
tokens; here the keys of a token depend only on the tokens at or before it. A padding token is in a bucket
with no other token: it attends to itself. Cost: one stable sort of B H R T numbers.
"""

import dataclasses

import torch
from torch import Tensor

from polyformer.core.sequence.context import Context


@dataclasses.dataclass(frozen=True, eq=False)
class Windows:
    """R independent sortings (rounds) of the T tokens of each head.

    Args:
        order: [B, H, R, T], the slots in sorted order.
        spots: [B, H, R, T], the spot of every slot (not in sorted order).
        size: m, which counts the token itself.
        causal: whether keys after the token are outside the window.
    """

    order: Tensor
    spots: Tensor
    size: int
    causal: bool

    def sees(self, query_spots: Tensor, key_spots: Tensor) -> Tensor:
        """Return whether queries on `query_spots` attend to keys on `key_spots`; the two broadcast."""
        apart = query_spots - key_spots
        return (apart >= 0) & (apart < self.size) if self.causal else apart.abs() < self.size


@torch.no_grad()
def bucket_windows(buckets: Tensor, size: int, context: Context) -> Windows:
    """Return the windows of `size` keys in buckets [B, H, R, T] of all T keys of `context`.

    Documents and padding are given by the context's keys; bucket numbers may be any non-negative integers.
    """
    length = buckets.shape[-1]
    flat = buckets.reshape(-1, length).long()
    rows = torch.arange(len(flat), device=flat.device).unsqueeze(1)
    valid = _expand_rows(context.kv_valid, buckets)
    if valid is not None:  # padding comes last
        flat = flat.masked_fill(~valid, max_number(flat) + 1)
    # A single long row, which torch sorts by radix. Documents do not decrease along a row, so a stable sort
    # by bucket also groups the tokens of a bucket by document.
    keys = (flat + rows * (max_number(flat) + 1)).flatten()
    small = torch.int32 if max_number(keys[-length:]) < 2**31 else torch.int64
    order = keys.to(small).sort(stable=True).indices.view_as(flat) - rows * length
    starts = torch.ones_like(flat, dtype=torch.bool)
    in_order = flat.gather(1, order)
    starts[:, 1:] = in_order[:, 1:] != in_order[:, :-1]
    documents = _expand_rows(context.kv_doc, buckets)
    if documents is not None:
        in_order = documents.gather(1, order)
        starts[:, 1:] |= in_order[:, 1:] != in_order[:, :-1]
    if valid is not None:
        starts |= ~valid.gather(1, order)
    spots = torch.arange(length, device=flat.device) + (size - 1) * (starts.cumsum(1) - 1)
    spots = torch.empty_like(spots).scatter_(1, order, spots)
    return Windows(order.view_as(buckets), spots.view_as(buckets), size, context.causal)


def max_number(numbers: Tensor) -> int:
    """Return the maximum of an integer tensor; 0 on the meta device, where only shapes are traced."""
    return 0 if numbers.is_meta else int(numbers.max())


def _expand_rows(table: Tensor | None, buckets: Tensor) -> Tensor | None:
    """Return a table [B, T] of the context expanded to the B H R rows."""
    if table is None:
        return None
    return table.view(-1, 1, 1, table.shape[-1]).expand_as(buckets).reshape(-1, table.shape[-1])
