"""Work items: some batch rows and some heads of a call, few enough for a cache."""

import bisect
import copy
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from polyformer.attention.functional.backends.tiled.tiles import Masks, Tile, TileSizes, plan, slots
from polyformer.attention.functional.request import Request
from polyformer.attention.patterns.base import Pattern
from polyformer.attention.patterns.implied import Full
from polyformer.core.ops.cpu import WORKERS
from polyformer.core.ops.layers import DropoutScales
from polyformer.core.ops.product_kernels import ONLY_BLAS, product_kernel

LN2 = math.log(2)
LOG2E = 1 / LN2


NEAR = 2
"""Largest number of intervals of keys at which the keys of a tile count as neighbours."""

WORTH_A_THREAD = 1 << 18
"""Number of scores from which a separate work item, and so a separate thread, is faster.

A score takes 1 to 5 nanoseconds, so this is about ten times the time that an operating system needs to wake a
thread.
"""

SMALL = 48.0
"""Largest exponent of 2 for which float32 has the range for sums of millions of such powers times values.

The values may be as large as the powers themselves.
"""


def work_items(request: Request, seed: int, threads: int, sizes: TileSizes) -> list["WorkItem"]:
    """Return the work items of a call, equal for equal `threads` and `sizes`; `seed` is for dropout."""
    batch, kv_heads = request.q.shape[0], request.k.shape[1]
    alike = heads_alike(request)
    # Some heads of several rows are not a view of the output, so an item of several rows has all heads.
    step = _rows_together(request, threads, sizes) if len(alike) == 1 else 1
    items: list[WorkItem] = []
    for first, (pattern, group) in itertools.product(range(0, batch, step), alike):
        rows = slice(first, min(first + step, batch))
        context, number = request.context.rows(first, rows.stop), (group.stop - group.start) * request.groups
        tiling = plan(pattern, context, step * number, sizes)
        # Cached masks must not take more memory than the queries.
        masks = _masks(request, pattern, keep=tiling.asked <= request.q[rows].numel())
        heads = kv_heads if step > 1 else max(1, tiling.room // request.groups)
        if step == 1 and not request.q.is_cuda and tiling.scores * number >= 2 * WORTH_A_THREAD:
            share = min(-(-kv_heads * batch // min(threads, WORKERS)), kv_heads)
            heads = -(-share // -(-share // heads))  # the same number of items for each thread, of equal size
        for head in range(group.start, group.stop, heads):
            own = slice(head, min(head + heads, group.stop))
            items.append(WorkItem(request, masks, tiling.rows, rows, own, seed + len(items)))
    return items


def _masks(request: Request, pattern: Pattern, keep: bool) -> Masks:
    """Return the masks of a pattern, which all layers with the same context share."""
    context, q = request.context, request.q
    return context.once(("masks", pattern, keep, q.dtype, q.device), lambda: Masks(pattern, context, keep))


def balanced(items: list["WorkItem"], threads: int) -> list["WorkItem"]:
    """Return the items, each divided by queries if they are no multiple of the threads.

    Only for forward passes: in a backward pass two parts of an item would add to the same gradients of keys.
    """
    workers = min(threads, WORKERS)
    if len(items) % workers == 0:
        return items
    return [part for index in range(workers) for item in items for part in item.share(index, workers)]


def heads_alike(request: Request) -> list[tuple[Pattern, slice]]:
    """Return runs of key heads that have the same pattern."""
    kv_heads, whole = request.k.shape[1], request.pattern or Full()
    runs: list[tuple[Pattern, slice]] = []
    for head in range(kv_heads):
        pattern = whole.head_pattern(head * request.groups)
        if runs and runs[-1][0] == pattern:
            runs[-1] = pattern, slice(runs[-1][1].start, head + 1)
        else:
            runs.append((pattern, slice(head, head + 1)))
    return runs


def _rows_together(request: Request, threads: int, sizes: TileSizes) -> int:
    """Return the number of batch rows to compute together, with all their heads.

    On a CPU only short rows with equal masks are computed together, and each thread still has a work item.
    """
    context, (batch, heads) = request.context, request.q.shape[:2]
    if batch == 1 or not (request.q.is_cuda or context.rows(0, 1) is context):
        return 1
    room = plan(request.pattern or Full(), context, heads, sizes).room
    most = room // heads if request.q.is_cuda else min(room // (2 * heads), batch // min(threads, WORKERS))
    return max(1, min(most, batch))


def in_shared_memory(group: Iterable["WorkItem"]) -> Iterator["WorkItem"]:
    """Yield the work items in turn, with shared scratch memory, for a single thread."""
    scratch: dict[str, Tensor] = {}
    for item in group:
        item.scratch = scratch
        yield item


class WorkItem:
    """A part of a call: keys [N, Tk, D] and queries [N, G, Tq, D].

    N is batch rows times key heads, and each key head has G query heads. Tiles of scores are
    [N, G * queries, keys]; the mods receive them as [B, H, queries, keys].
    """

    def __init__(
        self,
        request: Request,
        masks: Masks,
        rows: tuple[tuple[Tile, ...], ...],
        batch: slice,
        heads: slice,
        seed: int,
    ) -> None:
        self.request, self.rows, self.batch, self.kv_heads = request, rows, batch, heads
        self.heads = slice(heads.start * request.groups, heads.stop * request.groups)
        device = request.q.device
        self.b = torch.arange(batch.start, batch.stop, device=device).view(-1, 1, 1, 1)
        self.h = torch.arange(self.heads.start, self.heads.stop, device=device).view(1, -1, 1, 1)
        self.base = LOG2E if request.score_mod is None else 1.0  # a score_mod needs scores in base e
        self.factor = request.scale * self.base
        self.masks = masks
        self.scales = DropoutScales(seed)
        self.scratch: dict[str, Tensor] = {}  # shared by work items that are computed in turn
        self.products = ONLY_BLAS
        self.small_scores = False  # whether all scores are certain to be at most `SMALL` in size

    def share(self, index: int, number: int) -> Iterator["WorkItem"]:
        """Yield the part `index` of `number` parts with about equally many scores, unless it is empty."""
        sizes = [sum((tile.stop - tile.start) * tile.width for tile in row) for row in self.rows]
        ends = [end * number for end in itertools.accumulate(sizes)]
        first, last = (bisect.bisect_left(ends, sum(sizes) * part) for part in (index, index + 1))
        rows = self.rows[first : last if index + 1 < number else None]
        if rows:
            part = copy.copy(self)
            part.rows = rows
            yield part

    def by_key(self, x: Tensor) -> Tensor:
        """Return x [B, Hkv, ...] as [N, ...]."""
        return x[self.batch, self.kv_heads].flatten(0, 1)

    def gathered(self, name: str, x: Tensor) -> Tensor:
        """Return `by_key`, with the rows of each head copied to contiguous memory if that is faster.

        The copy is faster if tiles read rows more than once on average or read scattered rows: strided rows
        are slow to read, and products would copy them again each time.
        """
        own, tiles = self.by_key(x), [tile for row in self.rows for tile in row]
        again = sum(tile.width for tile in tiles) > x.shape[2]
        if own.is_contiguous() or not (again or any(len(tile.keys) > NEAR for tile in tiles)):
            return own
        return self.room(name, own.shape, own).copy_(own)

    def by_query(self, x: Tensor) -> Tensor:
        """Return x [B, H, Tq, D] as [N, G, Tq, D]."""
        return x[self.batch, self.heads].unflatten(1, (-1, self.request.groups)).flatten(0, 1)

    def look_at(self, q: Tensor, k: Tensor) -> None:
        """Choose the implementation of products and bound the scores, for q [N, G, Tq, D] and k [N, Tk, D].

        The bound is q_i . k_j <= |q_i| |k_j|.
        """
        self.products = product_kernel(q, k, self.request.q.dtype)
        # Relative terms and a score_mod have no known bound. On a GPU reading the norms would synchronise the
        # device, and the meta device has no numbers.
        if self.request.score_mod is None and self.request.relative is None and q.is_cpu:
            norms = (torch.linalg.vector_norm(x, dim=-1).amax() for x in (q, k) if x.numel())
            self.small_scores = math.prod(map(float, norms)) * abs(self.factor) <= SMALL

    def queries(self, x: Tensor, tile: Tile) -> Tensor:
        """Return the queries of a tile from x [N, G, Tq, D], with joined groups: [N, G * queries, D]."""
        return x[:, :, tile.start : tile.stop].flatten(1, 2)

    def put(self, x: Tensor, tile: Tile, value: Tensor) -> None:
        """Write [N, G * queries, D] to the queries of a tile in x [N, G, Tq, D]."""
        x[:, :, tile.start : tile.stop] = value.view(*x.shape[:2], -1, x.shape[3])

    def raw(self, tile: Tile, queries: Tensor, keys: Tensor) -> Tensor:
        """Return the scores [N, G * queries, keys] before any term is added, in reused memory."""
        return self.product("scores", queries, keys.mT)

    def mod_arguments(self, tile: Tile, scores: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the arguments of a score_mod: scores [B, H, queries, keys], b, h, q_idx and kv_idx.

        q_idx is [queries, 1].
        """
        q_idx = torch.arange(tile.start, tile.stop, device=scores.device).view(-1, 1)
        return self.tiled(tile, scores), self.b, self.h, q_idx, slots(tile.keys, scores.device)

    def finish(self, tile: Tile, value: Tensor) -> Tensor:
        """Return the result of a score_mod in base 2 and masked: [N, G * queries, keys]."""
        shape = (len(self.b), self.h.shape[1], tile.stop - tile.start, tile.width)
        scores = (value * LOG2E).expand(shape).unflatten(1, (-1, self.request.groups))
        return self.forbid(tile, scores.flatten(2, 3).flatten(0, 1).contiguous())

    def forbid(self, tile: Tile, scores: Tensor) -> Tensor:
        """Mask `scores` [N, G * queries, keys] in place and return them."""
        finite = self.request.score_mod is None  # a score_mod may return NaN for masked pairs
        self.masks.forbid(self.tiled(tile, scores), tile, self.b, self.h, finite)
        return scores

    def tiled(self, tile: Tile, x: Tensor) -> Tensor:
        """Return x [N, G * queries, keys] as [B, H, queries, keys]."""
        return x.view(len(self.b), self.h.shape[1], tile.stop - tile.start, tile.width)

    def product(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        """Return a @ b for the largest products, in memory that all tiles share."""
        if len(a) == 1 and self.products.by_onednn(a, b):
            return self.products(a, b)
        return self.products(a, b, self.room(name, (a.shape[0], a.shape[1], b.shape[2]), a))

    def room(self, name: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return memory of this shape that all tiles and the next work items share."""
        size = math.prod(shape)
        if name not in self.scratch or self.scratch[name].numel() < size:
            self.scratch[name] = like.new_empty(size)
        return self.scratch[name][:size].view(shape)

    def kept(self, like: Tensor) -> Tensor:
        """Return the scale of dropout for each kept weight and 0 for the others, the same in both passes."""
        return self.scales.next(like, self.request.dropout)
