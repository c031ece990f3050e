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

Blocks of queries are computed with the run of keys that their windows cover (`WindowBlocks`).
"""

import dataclasses
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from polyformer.attention.functional.cache_capacity import cache_capacity
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
        flat = flat.masked_fill(~valid, flat.max() + 1)
    # A single long row, which torch sorts by radix. Documents do not decrease along a row, so a stable sort
    # by bucket also groups the tokens of a bucket by document.
    keys = (flat + rows * (flat.max() + 1)).flatten()
    # Reading the maximum on a GPU would wait for it.
    small = torch.int32 if not flat.is_cuda and max_number(keys[-length:]) < 2**31 else torch.int64
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


MIN_BLOCK, MAX_BLOCK = 32, 128
"""Limits of the tokens per block, which is otherwise the window size.

Smaller products are inefficient on any processor; in larger blocks, half or more of the scores are outside
the windows.
"""

MASKED = 1e30
"""Subtracted from the scores of masked keys: larger than any score."""


class WindowBlocks:
    """Blocks of queries, and for each the `width` keys from `back` blocks before it on.

    A query attends to a key if |spot of query - spot of key - middle| <= radius.
    """

    def __init__(self, windows: Windows, length: int, like: Tensor):
        self.length = length
        self.block = min(max(windows.size, MIN_BLOCK), MAX_BLOCK, length)
        self.count = -(-length // self.block)
        self.back = min(-(-(windows.size - 1) // self.block), self.count - 1)
        self.ahead = 0 if windows.causal else self.back
        self.blocks = self.back + 1 + self.ahead
        self.width = self.blocks * self.block
        # 0 <= d < m is |d - (m - 1) / 2| <= (m - 1) / 2: one comparison for both forms.
        self.middle = (windows.size - 1) / 2 if windows.causal else 0.0
        self.radius = (windows.size - 1) / 2 if windows.causal else windows.size - 1.0
        self.step = max(1, cache_capacity(like) // (self.block * self.width))

    @property
    def steps(self) -> Iterator[tuple[int, int]]:
        """Runs (start, stop) of blocks that are computed together."""
        return itertools.pairwise([*range(0, self.count, self.step), self.count])

    def queries(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """Return x [..., L, D] in sorted order as blocks [..., count, block, D]."""
        short = self.count * self.block - self.length
        x = torch.nn.functional.pad(x, (0, 0, 0, short), value=fill) if short else x
        return x.unflatten(-2, (self.count, self.block))

    def keys(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """Return x [..., L, D] in sorted order as overlapping keys of each block, [..., count, width, D]."""
        short = self.count * self.block - self.length
        around = self.back * self.block, self.ahead * self.block + short
        x = torch.nn.functional.pad(x, (0, 0, *around), value=fill)
        # A view: the keys of neighbouring blocks overlap in memory.
        return x.unfold(-2, self.width, self.block).transpose(-1, -2)

    def key_totals(self, x: Tensor) -> Tensor:
        """Return zeros [blocks, block, D], to which `add_keys` adds the gradients of keys."""
        return x.new_zeros(self.back + self.count + self.ahead, self.block, x.shape[-1])

    def add_keys(self, totals: Tensor, start: int, values: Tensor) -> None:
        """Add values [n, width, D] of the keys of the blocks from `start` on."""
        for i, part in enumerate(values.split(self.block, 1)):
            totals[start + i : start + i + len(part)] += part

    def sorted_keys(self, totals: Tensor) -> Tensor:
        """Return the totals as [L, D] in sorted order."""
        return totals[self.back :].flatten(0, 1)[: self.length]


class Round:
    """A round of a row: its tokens in sorted order, and the spots that decide which keys each query sees."""

    def __init__(self, blocks: WindowBlocks, number: int, order: Tensor, spots: Tensor):
        self.blocks, self.order = blocks, order[number]
        self.place = torch.empty_like(self.order)
        # The inverse permutation, from slots to places in sorted order.
        self.place[self.order] = torch.arange(blocks.length, device=order.device)
        # Spots of earlier rounds too: their keys are counted already and get masked.
        own = spots[: number + 1].index_select(1, self.order).unsqueeze(-1)
        # Places added to fill a block are far from all spots.
        self.query_spots = blocks.queries(own - blocks.middle, fill=4 * MASKED)
        self.key_spots = blocks.keys(own, fill=-4 * MASKED).mT

    def queries(self, x: Tensor) -> Tensor:
        """Return x [L, D] as blocks of queries."""
        return self.blocks.queries(x.index_select(0, self.order))

    def keys(self, x: Tensor) -> Tensor:
        """Return x [L, D] as the keys of each block."""
        return self.blocks.keys(x.index_select(0, self.order))

    def unsorted(self, x: Tensor) -> Tensor:
        """Return blocks [count, block, D] of queries as [L, D] in the order of slots."""
        return x.flatten(0, 1).index_select(0, self.place)

    def scores(self, q: Tensor, k: Tensor, start: int, stop: int) -> Tensor:
        """Return scores [n, block, width] of the blocks start..stop, far below 0 for masked keys.

        Masked are keys outside the window, keys in the window of an earlier round, and the token itself.
        """
        scores = torch.bmm(q[start:stop], k[start:stop].mT)
        *earlier, own = range(len(self.query_spots))
        for number in (own, *earlier):
            unseen = (self.query_spots[number, start:stop] - self.key_spots[number, start:stop]).abs_()
            # Comparisons that write floats are vectorized; comparisons to bool and masked fills are not.
            radius = self.blocks.radius
            unseen = unseen.gt_(radius) if number == own else unseen.le_(radius)
            scores.sub_(unseen, alpha=MASKED)
        scores.diagonal(self.blocks.back * self.blocks.block, 1, 2).fill_(-MASKED)
        return scores
