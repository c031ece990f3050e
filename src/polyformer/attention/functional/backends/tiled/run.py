"""Exact attention over the keys of a layout, tile by tile, for any pattern and device, forward and backward.

No tensor of size Tq x Tk is allocated. The forward pass stores the output and, for each row, the largest
score and the sum of the exponentials relative to it.
The backward pass recomputes the scores, tile by tile, and adds to gradients that are allocated once (Dao et
al. 2022, FlashAttention, algorithms 1 and 4; here over the intervals of a layout). Scores are in base 2
because exp2 is faster than exp on a CPU. float16 and bfloat16 are computed in float32, but stored in their
type; a GPU rounds only the factors of products to it.

`torch.compile` cannot trace it: the tiles depend on the layout, and the gradients of a `score_mod` are found
by recording its execution. Use the backends `sdpa` or `flex` under `fullgraph=True`.

The sizes of tiles are chosen for this machine, from the size of its cache and from timings of some tiles.
"""

import dataclasses
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from polyformer.attention.functional.backends.tiled import fused_rows
from polyformer.attention.functional.backends.tiled.batched_tiles import BatchedTiles, batch_tiles
from polyformer.attention.functional.backends.tiled.relative_terms import (
    DistanceTables,
    RelativeGradients,
    RelativeTerms,
)
from polyformer.attention.functional.backends.tiled.rows import (
    Gradients,
    TileInputs,
    row_backward,
    row_forward,
)
from polyformer.attention.functional.backends.tiled.score_mod_gradients import checked, tables_with_gradients
from polyformer.attention.functional.backends.tiled.tiles import BLOCKS, CUDA, Masks, Tile, TileSizes, plan
from polyformer.attention.functional.backends.tiled.work_items import (
    LN2,
    WorkItem,
    balanced,
    heads_alike,
    in_shared_memory,
    work_items,
)
from polyformer.attention.functional.request import Request, transformed
from polyformer.attention.patterns.windows import Window
from polyformer.core.ops.autograd import at_least_float32, autocast_disabled, first_order
from polyformer.core.ops.cpu import parallel_map, threads
from polyformer.core.ops.product_kernels import BATCHED_PRODUCTS
from polyformer.core.ops.tuning import Section, core_cache, least_seconds
from polyformer.core.sequence.context import Context

T = TypeVar("T")


def refuses(request: Request) -> str | None:
    """Return why this backend cannot run the request, or None."""
    if transformed():
        return "torch.func and forward differentiation cannot look into its loop over tiles"
    return None


def details(request: Request) -> str:
    """Return how a call is computed here, if not tile by tile, and why."""
    q, k, v = request.q, request.k, request.v
    if q.is_meta or (torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))):
        return ""
    price = _price(request)
    call = _Call(request, (), None, 0, torch.get_num_threads(), tile_sizes(q.device))
    if call.row_runs(price) is None:
        return ""
    return f"rows by torch's fused kernel, {price * CLEARLY:.2g} times as fast as tiles on this machine"


@torch.compiler.disable(reason="tiled walks a layout in Python; compile with the backend 'sdpa' or 'flex'")
def run(request: Request) -> tuple[Tensor, Tensor]:
    """Return output [B, H, Tq, Dv] and log-sum-exp [B, H, Tq]."""
    q, k, v = request.q, request.k, request.v
    exact = torch.promote_types(q.dtype, torch.float32)
    tables = tables_with_gradients(request.score_mod, q.new_empty(0, dtype=exact))
    if request.score_mod is not None and torch.is_grad_enabled():
        request = dataclasses.replace(request, score_mod=checked(request.score_mod, tables))
    # The seed is from torch's generator, so that torch.manual_seed makes a run reproducible; a faster
    # generator draws the remaining numbers.
    seed = int(torch.randint(2**62, ())) if request.dropout else 0
    threads, sizes, distances = torch.get_num_threads(), tile_sizes(q.device), None
    if request.relative is not None:
        items = work_items(request, seed, threads, sizes)
        distances = DistanceTables.from_relative(request.relative.to(exact), items, request.context.offset)
    call = _Call(request, tables, distances, seed, threads, sizes)
    extra = () if distances is None else tuple(distances.tensors.values())
    return _TiledAttention.apply(call, q, k, v, *extra, *tables)  # type: ignore[misc]


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    """The data that forward and backward share, except the tensors of autograd."""

    request: Request
    tables: tuple[Tensor, ...]
    distances: DistanceTables | None
    seed: int
    threads: int
    sizes: TileSizes

    def row_runs(self, price: float) -> list[fused_rows.RowRun] | None:
        """Return the rows as calls of a fused kernel, for inference; None if the tiles are better.

        price: the time of a score in tiles, in scores of the kernel.
        """
        patterns = heads_alike(self.request) if price else []
        if len(patterns) != 1:
            return None
        pattern, context = patterns[0][0], self.request.context
        scores = plan(pattern, context, 1, self.sizes).scores
        return fused_rows.row_runs(self.request, pattern, price * scores)

    def parallel_map(self, work: Callable[[Sequence[WorkItem]], T], balance: bool = False) -> list[T]:
        """Return the results of `work` on all parts, with threads on a CPU; both passes have equal parts.

        balance: divide the parts further if the threads would get different numbers of them.
        """
        items = work_items(self.request, self.seed, self.threads, self.sizes)
        # The seed of a part determines its dropout, so parts with dropout are not divided.
        if balance and not self.request.dropout:
            items = balanced(items, self.threads)
        return parallel_map(work, items, self.request.q.device)


def _forward(
    call: _Call,
    inputs: tuple[Tensor, Tensor, Tensor],
    outputs: tuple[Tensor, Tensor, Tensor],
    distances: DistanceTables | None = None,
    balance: bool = False,
) -> None:
    """Write output [B, H, Tq, Dv], and m and s of `row_forward` [B, H, Tq, 1], which are 0 before."""
    q, k, v = inputs

    def work(group: Sequence[WorkItem]) -> None:
        for item in in_shared_memory(group):
            own = item.by_query(q), item.gathered("keys", k), item.gathered("values", v)
            out, peaks, sums = map(item.by_query, outputs)
            terms = None if distances is None else RelativeTerms(item, distances)
            item.look_at(*own[:2])
            batches, rest = batch_tiles(item, call.sizes.entries)
            for batch in batches:
                tiles = BatchedTiles(item, batch)
                for x, part in zip((out, peaks, sums), tiles.forward(*own)):
                    tiles.put(x, part)
            for row in rest:
                value, peak, total = row_forward(item, terms, row, *own)
                item.put(out, row[0], value)
                item.put(sums, row[0], total)
                if peak is not None:
                    item.put(peaks, row[0], peak)

    call.parallel_map(work, balance)


class _TiledAttention(torch.autograd.Function):
    """The function out, lse = attention(q, k, v); `extra`: tables by distance, then tables of a score_mod."""

    @staticmethod
    def forward(
        ctx: Any, call: _Call, q: Tensor, k: Tensor, v: Tensor, *extra: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return output [B, H, Tq, Dv] and log-sum-exp [B, H, Tq], by `row_forward`."""
        raw = q, k, v
        q, k, v = map(at_least_float32, raw)
        out = q.new_zeros(*q.shape[:3], v.shape[3])
        peak, total = q.new_zeros(2, *q.shape[:3], 1)
        lse: Tensor | None = None
        distances = None if call.distances is None else call.distances.with_tensors(extra)
        inference = not any(ctx.needs_input_grad)
        if not q.is_meta:  # the meta device only traces shapes
            runs = call.row_runs(_price(call.request)) if inference else None
            if runs is not None:
                lse = q.new_full((*q.shape[:3], 1), -torch.inf)
                fused_rows.forward(runs, (q, k, v), call.request.scale, out, lse)
            else:
                _forward(call, (q, k, v), (out, peak, total), distances, balance=inference)
        lse = (total.log2().add_(peak).mul_(LN2) if lse is None else lse).squeeze(-1)
        if raw[0].dtype != out.dtype:  # ordered by token in memory: the next layer reads all heads of a token
            rows = out.new_empty(out.transpose(1, 2).shape, dtype=raw[0].dtype)
            out = rows.transpose(1, 2).copy_(out)
        ctx.call = call
        ctx.save_for_backward(*raw, out, peak, total, *extra)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @first_order("attend's backend 'tiled'")
    @autocast_disabled
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of all inputs, by `row_backward`."""
        saved = ctx.saved_tensors
        (q, k, v), (out, peak, total), extra = map(at_least_float32, saved[:3]), saved[3:6], saved[6:]
        call: _Call = ctx.call
        rows = _row_values(grad_out, grad_lse, out, peak, total)
        grad_q = q.new_zeros(q.shape)
        grad_k, grad_v = _columns(k), _columns(v)
        distances = grad_distances = None
        if call.distances is not None:
            distances = call.distances.with_tensors(extra)
            grad_distances = distances.zero_gradients(ctx.needs_input_grad[4:])
        # Only the gradients of the tables by distance are shared by work items of different threads.
        lock = threading.Lock()

        def work(group: Sequence[WorkItem]) -> tuple[Tensor, ...]:
            grad_tables = tuple(torch.zeros_like(table) for table in call.tables)
            for item in in_shared_memory(group):
                terms = None
                if distances is not None and grad_distances is not None:
                    terms = RelativeGradients(item, distances, grad_distances, lock)
                inputs = TileInputs(
                    item.by_query(q), item.gathered("keys", k), item.gathered("values", v), terms, call.tables
                )
                grads = Gradients(
                    item.by_query(grad_q), item.by_key(grad_k), item.by_key(grad_v), grad_tables
                )
                item.look_at(*inputs[:2])
                outs = tuple(item.by_query(x) for x in rows)
                batches, rest = batch_tiles(item, call.sizes.entries)
                for batch in batches:
                    BatchedTiles(item, batch).backward(inputs[:3], outs, grads[:3])
                for row in rest:
                    row_backward(item, row, inputs, outs, grads)
                if terms is not None:
                    terms.finish()
            return grad_tables

        grad_tables = _sum_of_threads(call.parallel_map(work))
        scale, grad_extra = call.request.scale, []
        if distances is not None and grad_distances is not None:
            grad_extra = grad_distances.scaled(scale, distances)
        own = (grad_q.mul_(scale), grad_k.mul_(scale).mT, grad_v.mT)
        return None, *(x.to(out.dtype) for x in own), *grad_extra, *grad_tables


def _sum_of_threads(parts: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Return the gradients of captured tables, which every thread summed separately."""
    for other in parts[1:]:
        for total, more in zip(parts[0], other):
            total += more
    return parts[0]


def _row_values(
    grad_out: Tensor | None, grad_lse: Tensor | None, out: Tensor, peak: Tensor, total: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `row_backward` reads of each query: gradient and shift over `total`, and the peak."""
    grad_out = at_least_float32(torch.zeros_like(out) if grad_out is None else grad_out)
    # shift_i of `row_backward`: all paths through the denominator.
    shift = (grad_out * out).sum(-1)
    shift = shift if grad_lse is None else shift - grad_lse
    # A query without keys has a sum of 0: its masked scores give weights of 0, not NaN.
    empty = total == 0
    total = total.masked_fill(empty, 1)
    shift = shift.unsqueeze(-1).masked_fill(empty, 0)
    return grad_out / total, shift / total, peak.masked_fill(empty, 0)


def _columns(x: Tensor) -> Tensor:
    """Return zeros [B, H, D, T] for x [B, H, T, D]: products that add to columns are the fastest.

    The row stride is a little larger than the row length, because rows at a power of 2 would compete for the
    same cache lines.
    """
    return x.new_zeros(*x.shape[:2], x.shape[3], x.shape[2] + 16)[..., : x.shape[2]]


def _price(request: Request) -> float:
    """Return the time of a score in tiles on this machine, in scores of the fused kernel; 0 without it.

    A dispatch mode, such as a counter of operations, sees the loop over tiles, and nothing is measured in it.
    """
    if not request.q.is_cpu or request.q.shape[2] < fused_rows.LEAST or is_in_torch_dispatch_mode():
        return 0.0
    return ROWS().of(request) / CLEARLY


def _measured_prices() -> fused_rows.RowPrices:
    """Measure both ways for a window, with this number of threads and key heads of both kinds."""
    return fused_rows.RowPrices(own=_measured_price(1), grouped=_measured_price(3))


def _measured_price(groups: int) -> float:
    heads, length, width = 6, 1024, 64
    q = torch.full((1, heads, length, width), 0.1, dtype=torch.float32)
    k = q[:, ::groups].contiguous()
    context, pattern, sizes = Context(length, length), Window(256), tile_sizes(q.device)
    request = Request(q, k, k, context, pattern, None, None, width**-0.5)
    call = _Call(request, (), None, 0, torch.get_num_threads(), sizes)
    runs = call.row_runs(math.inf)
    assert runs is not None, "an infinite price allows any number of scores"
    out, (lse, sums) = q.new_empty(q.shape), q.new_empty((2, *q.shape[:3], 1))
    ways = {
        "tiles": lambda: _forward(call, (q, k, k), (out, lse, sums), balance=True),
        "rows": lambda: fused_rows.forward(runs, (q, k, k), request.scale, out, lse),
    }
    scores = {
        "tiles": plan(pattern, context, 1, sizes).scores,
        "rows": sum((run.stop - run.start) * len(run.keys) // run.rows for run in runs),
    }

    def reading() -> float:
        least = least_seconds(ways, rounds=5)
        return least["tiles"] / scores["tiles"] * scores["rows"] / least["rows"]

    return agreed_price(reading)


def agreed_price(reading: Callable[[], float]) -> float:
    """Return the price that two successive readings agree on; 0 if none do, as on a busy machine."""
    earlier = math.inf
    for _ in range(READINGS):
        price = reading()
        if max(price, earlier) < AGREED * min(price, earlier):
            return min(price, earlier)
        earlier = price
    return 0.0


READINGS, AGREED = 4, 1.3
"""The most readings of a price, and the ratio below which two are the same: other load can last for one."""

CLEARLY = 1.2
"""The factor by which the kernel must be faster: longer texts than the measured ones slow it down more."""

ROWS = Section("rows", fused_rows.RowPrices(), _measured_prices)
"""The prices of rows of queries by the fused kernel, by which a call in inference is divided."""


KEYS, WIDTH, FEW = 512, 64, 4
"""Keys of the timed rows, the head dimension, and a number of queries and keys with negligible work."""

ENTRY = 4
"""Bytes of a score."""


def tile_sizes(device: torch.device) -> TileSizes:
    """Return the tile sizes of the device; measure them before the work is divided among threads."""
    if device.type == "cuda":
        return CUDA
    if 1 not in BATCHED_PRODUCTS.by_threads:  # else every call of attention would set the threads twice
        with threads(1):
            BATCHED_PRODUCTS()
    return TILES()


def _measured_sizes() -> TileSizes:
    """Measure the costs of rows of a single head with a single thread, as in work divided among threads.

    No tile is larger than the cache of a core, or than the memory that allocators retain for the next tile.
    """
    entries = min(max(core_cache() // ENTRY, 1 << 16), 1 << 18)
    with threads(1):
        # A tile with almost no work: the cost of starting its operations.
        start = least_seconds({FEW: _row(FEW, FEW)}, rounds=20)[FEW]
        rows = least_seconds({block: _row(block, KEYS) for block in BLOCKS}, rounds=8)
        mask = least_seconds({KEYS: _mask}, rounds=6)[KEYS]
    return TileSizes(
        prices=tuple(max(rows[block] - start, start) / (block * KEYS) * 1e9 for block in BLOCKS),
        start=start * 1e9,
        asked=mask / KEYS**2 * 1e9,
        width=entries // 256,
        entries=entries,
    )


def _row(queries: int, keys: int) -> Callable[[], object]:
    """Return a function that runs the forward pass of a row of a single head."""
    q, k = (torch.full((1, 1, n, WIDTH), 0.1, dtype=torch.float32) for n in (queries, keys))
    context = Context(queries, keys)
    request = Request(q, k, k, context, None, None, None, WIDTH**-0.5)
    row = (Tile(0, queries, ((0, keys),), ()),)
    item = WorkItem(request, Masks(None, context), (row,), slice(0, 1), slice(0, 1), seed=0)
    item.look_at(q, k[0])
    return lambda: row_forward(item, None, row, q, k[0], k[0])


def _mask() -> torch.Tensor:
    """Return the mask of a typical pattern of distances for `KEYS` queries and keys."""
    slots = torch.arange(KEYS)
    allowed = (slots.view(-1, 1) - slots).abs() <= KEYS // 2
    return torch.full(allowed.shape, torch.inf, dtype=torch.float32).masked_fill_(~allowed, -torch.inf)


TILES = Section("tiles", TileSizes(), _measured_sizes)
