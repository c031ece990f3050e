"""Batches of rows of equal size without a mask, which are most of the rows of block patterns.

A tile of a single head is so small that starting its operations takes longer than computing them. Here the
queries of several rows and the keys of each row are gathered, and a single operation computes all tiles:
[N, M tiles, queries or keys, D] as a batch of N * M matrices.
"""

import dataclasses
import functools

from torch import Tensor

from polyformer.attention.functional.backends.tiled.tiles import Tile, add_columns, slots
from polyformer.attention.functional.backends.tiled.work_items import WorkItem


@dataclasses.dataclass(frozen=True)
class TileBatch:
    """M tiles of equal shape without a mask, each the only tile of its row."""

    tiles: tuple[Tile, ...]

    @functools.cached_property
    def queries(self) -> tuple[tuple[int, int], ...]:
        """Return the queries of all tiles, as intervals."""
        return tuple((tile.start, tile.stop) for tile in self.tiles)

    @functools.cached_property
    def keys(self) -> tuple[tuple[int, int], ...]:
        """Return the keys of all tiles in turn, as intervals that may overlap."""
        return tuple(interval for tile in self.tiles for interval in tile.keys)


def batch_tiles(item: WorkItem, entries: int) -> tuple[list[TileBatch], list[tuple[Tile, ...]]]:
    """Return the batches of tiles of a work item, of at most `entries` scores, and the remaining rows."""
    if item.request.score_mod is not None or item.request.relative is not None:
        return [], list(item.rows)
    groups: dict[tuple[int, int], list[Tile]] = {}
    rest: list[tuple[Tile, ...]] = []
    for row in item.rows:
        # Tiles of equal shape form a batch.
        if len(row) == 1 and not row[0].masked:
            groups.setdefault((row[0].stop - row[0].start, row[0].width), []).append(row[0])
        else:
            rest.append(row)
    heads = len(item.b) * item.h.shape[1]
    batches: list[TileBatch] = []
    for (queries, width), tiles in groups.items():
        most = entries // (heads * queries * width)
        # A single tile gains nothing, and a gather from a KV cache with free slots copies the whole cache.
        if most < 2 or len(tiles) == 1:
            rest.extend((tile,) for tile in tiles)
        else:
            batches.extend(TileBatch(tuple(tiles[i : i + most])) for i in range(0, len(tiles), most))
    return batches, rest


class BatchedTiles:
    """Gathered queries and keys of a batch of tiles, as [N * M, ...] matrices."""

    def __init__(self, item: WorkItem, tile_batch: TileBatch) -> None:
        self.item, self.tile_batch, self.number = item, tile_batch, len(tile_batch.tiles)
        device = item.request.q.device
        self.q_slots, self.k_slots = slots(tile_batch.queries, device), slots(tile_batch.keys, device)

    def queries(self, x: Tensor) -> Tensor:
        """Return the queries of the tiles from x [N, G, Tq, D] as [N * M, G * queries, D]."""
        # [N, G, M * queries, D] -> [N, G, M, queries, D] -> [N, M, G, queries, D] -> [N * M, G * queries, D]
        tiles = x.index_select(2, self.q_slots).unflatten(2, (self.number, -1))
        return tiles.transpose(1, 2).flatten(2, 3).flatten(0, 1)

    def put(self, x: Tensor, value: Tensor) -> None:
        """Write [N * M, G * queries, D] to the queries of x [N, G, Tq, D]."""
        tiles = value.unflatten(0, (-1, self.number)).unflatten(2, (x.shape[1], -1))
        x.index_copy_(2, self.q_slots, tiles.transpose(1, 2).flatten(2, 3))

    def keys(self, x: Tensor) -> Tensor:
        """Return the keys of the tiles from x [N, Tk, D] as [N * M, keys, D]."""
        return x.index_select(1, self.k_slots).unflatten(1, (self.number, -1)).flatten(0, 1)

    def add_to_keys(self, table: Tensor, gradient: Tensor) -> None:
        """Add [N * M, D, keys] to the keys of a table [N, D, Tk]."""
        for tile, own in zip(self.tile_batch.tiles, gradient.unflatten(0, (-1, self.number)).unbind(1)):
            add_columns(table, tile.keys, own)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return outputs [N * M, G * queries, Dv], and m and s of `row_forward` [N * M, G * queries, 1]."""
        scores = self.item.product("scores", self.queries(q) * self.item.factor, self.keys(k).mT)
        # Each tile is a whole row without a mask: a plain softmax, without running sums.
        peak = scores.amax(-1, keepdim=True)
        weights = scores.sub_(peak).exp2_()
        total = weights.sum(-1, keepdim=True)
        if self.item.request.dropout:
            weights *= self.item.kept(weights)
        return self.item.products(weights, self.keys(v)) / total, peak, total

    def backward(
        self,
        inputs: tuple[Tensor, Tensor, Tensor],
        outs: tuple[Tensor, ...],
        grads: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """Add the gradients of the tiles, by the equations of `row_backward`."""
        queries, keys, values = self.queries(inputs[0]), self.keys(inputs[1]), self.keys(inputs[2])
        grad_out, shift, peak = map(self.queries, outs)
        scores = self.item.product("scores", queries * self.item.factor, keys.mT)
        weights = scores.sub_(peak).exp2_()
        grad_weights = self.item.product("gradient", grad_out, values.mT)
        kept = weights
        if self.item.request.dropout:
            keep = self.item.kept(weights)
            kept, grad_weights = weights * keep, grad_weights.mul_(keep)
        self.add_to_keys(grads[2], self.item.products(grad_out.mT, kept))
        # grad_score_ij = p_ij (grad_p_ij - shift_i)
        grad_scores = grad_weights.sub_(shift).mul_(weights)
        self.add_to_keys(grads[1], self.item.products(queries.mT, grad_scores))
        self.put(grads[0], self.item.products(grad_scores, keys))
