"""How tiles are cut on this machine: its cache says how large they may be, and some are timed."""

from collections.abc import Callable

import torch

from polyformer.dot_product.backends.tiled.row_forward import row_forward
from polyformer.dot_product.backends.tiled.tile_sizes import BLOCKS, CUDA, TileSizes
from polyformer.dot_product.backends.tiled.tiles import Masks, Tile
from polyformer.dot_product.backends.tiled.work_items import WorkItem
from polyformer.dot_product.request import Request
from polyformer.ops.products import BATCHED_PRODUCTS
from polyformer.ops.tuning import Section
from polyformer.ops.tuning.machine import core_cache
from polyformer.ops.tuning.stopwatch import least_seconds
from polyformer.ops.workers import threads
from polyformer.sequence.context import Context

KEYS, WIDTH, FEW = 512, 64, 4
"""Keys of the rows that are timed, a head's width, and so few queries and keys that a row is only started."""

ENTRY = 4
"""Bytes of a score."""


def tile_sizes(device: torch.device) -> TileSizes:
    """Those of the device, found before the work is divided among threads."""
    if device.type == "cuda":
        return CUDA
    if 1 not in BATCHED_PRODUCTS.by_threads:  # else every call of attention would set the threads twice
        with threads(1):
            BATCHED_PRODUCTS()
    return TILES()


def _measure() -> TileSizes:
    """Prices of rows of one head, with one thread, as those compute who divide work among threads.

    No tile is larger than a core's cache, nor than memory that allocators keep for the next.
    """
    entries = min(max(core_cache() // ENTRY, 1 << 16), 1 << 18)
    with threads(1):
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
    """The forward pass of one row of one head."""
    q, k = (torch.full((1, 1, n, WIDTH), 0.1, dtype=torch.float32) for n in (queries, keys))
    context = Context(queries, keys)
    request = Request(q, k, k, context, None, None, None, scale=WIDTH**-0.5, dropout=0.0)
    row = (Tile(0, queries, ((0, keys),), ()),)
    item = WorkItem(request, Masks(None, context), (row,), slice(0, 1), slice(0, 1), seed=0)
    item.look_at(q, k[0])
    return lambda: row_forward(item, None, row, q, k[0], k[0])


def _mask() -> torch.Tensor:
    """What patterns of distances ask about `KEYS` queries and keys."""
    slots = torch.arange(KEYS)
    allowed = (slots.view(-1, 1) - slots).abs() <= KEYS // 2
    return torch.full(allowed.shape, torch.inf, dtype=torch.float32).masked_fill_(~allowed, -torch.inf)


TILES = Section("tiles", TileSizes(), _measure)
