"""Tile sizes for this machine, from the size of its cache and from timings of some tiles."""

from collections.abc import Callable

import torch

from polyformer.attention.functional.backends.tiled.row_forward import row_forward
from polyformer.attention.functional.backends.tiled.tile_sizes import BLOCKS, CUDA, TileSizes
from polyformer.attention.functional.backends.tiled.tiles import Masks, Tile
from polyformer.attention.functional.backends.tiled.work_items import WorkItem
from polyformer.attention.functional.request import Request
from polyformer.core.ops.batched_products import BATCHED_PRODUCTS
from polyformer.core.ops.cpu import threads
from polyformer.core.ops.tuning import Section, core_cache, least_seconds
from polyformer.core.sequence.context import Context

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


def _measure() -> TileSizes:
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


TILES = Section("tiles", TileSizes(), _measure)
