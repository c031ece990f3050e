"""Relative terms of scores and outputs, tile by tile: products with the vectors of its distances."""

from collections.abc import Iterator

from torch import Tensor

from polyformer.attention.functional.backends.tiled.distance_tables import DistanceTables, diagonals, entries
from polyformer.attention.functional.backends.tiled.tiles import Tile
from polyformer.attention.functional.backends.tiled.work_items import WorkItem
from polyformer.core.ops.batched_products import product

ALL = slice(None)

KEPT = 1 << 22
"""Largest number of cached entries of bias tiles per work item; all tiles along a diagonal share an entry."""


class RelativeTerms:
    """The relative terms of a work item of B' batch rows and H' heads; products have M = B' H' matrices."""

    def __init__(self, item: WorkItem, tables: DistanceTables) -> None:
        self.item, self.tables = item, tables
        self.offset = item.request.context.offset
        self.rows, self.heads = len(item.b), item.h.shape[1]
        self.known: dict[tuple[int, int, int], Tensor] = {}
        self.zeros: dict[tuple[int, int, int], Tensor] = {}

    def content(self, tile: Tile, queries: Tensor) -> Tensor:
        """Return the vectors [M, Q, D], unscaled, that are multiplied with the position keys in a tile.

        By default they are the queries [N, G * Q, D] of the tile.
        """
        if self.tables.content is not None:
            queries = self.item.queries(self.item.by_query(self.tables.content), tile)
        return self._matrices(queries, tile)

    def add(self, scores: Tensor, tile: Tile, content: Tensor, keys: Tensor) -> None:
        """Add the terms to `scores` [N, G * Q, K]. content: the result of `content`. keys: [N, K, D]."""
        factor = self.item.factor
        whole = scores.view(self.rows * self.heads, tile.stop - tile.start, -1)
        if self.tables.keys is not None:
            # `factor` includes the base of the exponentials; content . key is scaled like q . k.
            content = content * factor
        for column, start, stop in columns_of(tile):
            block = whole[..., column : column + stop - start]
            if self.tables.bias is not None:
                block.unflatten(0, (self.rows, self.heads)).add_(self._bias(tile, start, stop))
            for group in self._matrix_groups():
                if self.tables.keys is not None:
                    vectors = self._slice(self.tables.keys, tile, start, stop, group)
                    block[group] += diagonals(product(content[group], vectors.mT), stop - start)
                if self.tables.queries is not None:
                    vectors = self._query_slice(self.tables.queries, tile, start, stop, group)
                    met = self._by_head(keys[:, column : column + stop - start], group) * factor
                    block[group] += diagonals(product(met, vectors.mT), tile.stop - tile.start).mT

    def values(self, tile: Tile, weights: Tensor) -> Tensor:
        """Return the sum of position values weighted by `weights` [N, G * Q, K]: [N, G * Q, Dv]."""
        assert self.tables.values is not None
        seen = weights.new_zeros(self.rows * self.heads, tile.stop - tile.start, self.tables.values.shape[2])
        whole = self._matrices(weights, tile)
        for column, start, stop in columns_of(tile):
            for group in self._matrix_groups():
                by_distance = self._spread_out(whole[group, :, column : column + stop - start])
                # Weights summed by distance, times the vectors of the distances: no [Q, K, Dv] tensor.
                seen[group] += product(by_distance, self._slice(self.tables.values, tile, start, stop, group))
        return seen.view(len(weights), -1, seen.shape[2])

    def _bias(self, tile: Tile, start: int, stop: int) -> Tensor:
        """Return the bias of the scores of a tile, [H' or 1, Q, K], in the base of the scores."""
        assert self.tables.bias is not None
        queries, width = tile.stop - tile.start, stop - start
        key = self._base(tile, start), queries, width
        # Tiles of equal shape on a diagonal share their bias.
        if key in self.known:
            return self.known[key]
        entries_here = self._heads_of(self.tables.bias)[:, slice(*self._range(tile, start, stop))]
        # A bias is added to scaled scores: only the base of the exponentials applies.
        entries_here = entries_here * self.item.base
        bias = diagonals(entries_here.unsqueeze(1).expand(-1, queries, -1).contiguous(), width)
        if bias.numel() * (len(self.known) + 1) <= KEPT:
            self.known[key] = bias
        return bias

    def _base(self, tile: Tile, start: int) -> int:
        """Return the entry of the distance between the first query of a tile and the key `start`."""
        return start - tile.start - self.offset + self.tables.greatest

    def _slice(self, table: Tensor, tile: Tile, start: int, stop: int, group: slice) -> Tensor:
        """Return the vectors of the distances of a tile, [M, Q + K - 1 or a few more, D]."""
        return self._each(table, *self._range(tile, start, stop), group)

    def _range(self, tile: Tile, start: int, stop: int) -> tuple[int, int]:
        """Return the entries of the distances of a tile, as (first, stop)."""
        first = self._base(tile, start) - (tile.stop - tile.start) + 1
        return first, first + entries(tile.stop - tile.start, stop - start)

    def _query_slice(self, table: Tensor, tile: Tile, start: int, stop: int, group: slice) -> Tensor:
        """Return the position queries of the distances of a tile, like `_slice`."""
        return self._each(table, *self._query_range(tile, start, stop), group)

    def _query_range(self, tile: Tile, start: int, stop: int) -> tuple[int, int]:
        """Return the entries of the position queries of a tile, as (first, stop)."""
        first = tile.start + self.offset - start - self.tables.least - (stop - start) + 1
        return first, first + entries(tile.stop - tile.start, stop - start)

    def _matrix_groups(self) -> list[slice]:
        """Return groups of the M matrices to compute together: single matrices on a CPU, for its cache."""
        matrices = self.rows * self.heads
        return [ALL] if self.item.request.q.is_cuda else [slice(i, i + 1) for i in range(matrices)]

    def _each(self, table: Tensor, first: int, last: int, group: slice) -> Tensor:
        """Return the entries first..last of a table [H or 1, R, D] for these matrices."""
        if group != ALL:
            return table[self._head(table, group), first:last]
        entries_here = self._heads_of(table)[:, first:last].expand(self.heads, -1, -1)
        return entries_here.expand(self.rows, *entries_here.shape).flatten(0, 1)

    def _head(self, table: Tensor, group: slice) -> slice:
        """Return the index of the head of a single matrix in a table."""
        head = 0 if len(table) == 1 else self.item.heads.start + group.start % self.heads
        return slice(head, head + 1)

    def _heads_of(self, table: Tensor) -> Tensor:
        """Return the heads of the work item from a table, or the single head that all heads share."""
        return table if len(table) == 1 else table[self.item.heads]

    def _by_head(self, keys: Tensor, group: slice) -> Tensor:
        """Return the keys [N, K, D] for the query heads of these matrices."""
        groups = self.item.request.groups
        if group != ALL:
            return keys[group.start // groups : group.start // groups + 1]
        return keys.repeat_interleave(groups, dim=0)

    def _spread_out(self, scores: Tensor) -> Tensor:
        """Return the inverse of `diagonals`: [M, Q, K] as [M, Q, entries], with zeros for other distances.

        The memory is reused: entries outside the diagonals are never written and stay zero.
        """
        matrices, queries, width = scores.shape
        by_distance = self.zeros.get((matrices, queries, width))
        if by_distance is None:
            by_distance = scores.new_zeros(matrices, queries, entries(queries, width))
            self.zeros[matrices, queries, width] = by_distance
        # A write through the strided view moves score (i, j) to entry j - i + Q - 1.
        diagonals(by_distance, width).copy_(scores)
        return by_distance

    def _matrices(self, x: Tensor, tile: Tile) -> Tensor:
        """Return x [N, G * Q, D] as [M, Q, D]."""
        return x.view(self.rows * self.heads, tile.stop - tile.start, x.shape[2])


def columns_of(tile: Tile) -> Iterator[tuple[int, int, int]]:
    """Yield the first column and the slots (start, stop) of each interval of the keys of a tile."""
    column = 0
    for interval in tile.keys:
        yield column, *interval
        column += interval[1] - interval[0]
