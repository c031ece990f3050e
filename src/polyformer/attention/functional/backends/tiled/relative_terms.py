"""Relative terms of scores and outputs, tile by tile, and their gradients.

With g_ij the gradient of the unscaled score and d the distance of query i and key j:

    score_ij = .. + content_i . keys[d] + queries[d] . k_j + bias[d]
    out_i    = sum_j p_ij (v_j + values[d])

    grad_content_i = sum_j g_ij keys[d]         grad_keys[d]    = sum over pairs at d of g_ij content_i
    grad_k_j       = sum_i g_ij queries[d]      grad_queries[d] = sum over pairs at d of g_ij k_j
    grad_bias[d]   = sum over pairs at d of g_ij
    grad_p_ij      = grad_out_i . values[d]     grad_values[d]  = sum over pairs at d of p_ij grad_out_i

`DistanceTables` has the tables of `Relative` over the distances of a call, in the order of the key slots.
The Q queries and K keys of a tile have Q + K - 1 different distances. If `x[i, m]` is the term of query i for
distance m, score (i, j) needs `x[i, j - i + Q - 1]`. This is a view of the product with a row stride that is
shorter by 1, so that no gather is needed (the shift of Dai et al. 2019, appendix B, without the copy).

Sums over pairs at a distance become products too after the tile is spread out by distance, the inverse of the
view along diagonals in the forward pass.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from polyformer.attention.functional.backends.tiled.tiles import Tile
from polyformer.attention.functional.backends.tiled.work_items import WorkItem
from polyformer.attention.functional.relative import Relative
from polyformer.core.ops.product_kernels import product

NAMES = "content", "bias", "keys", "values", "queries"
STEP = 16
"""Products with a multiple of this number of columns are fastest; the tables have this many extra entries."""


@dataclasses.dataclass(frozen=True, eq=False)
class DistanceTables:
    """Tables of `Relative` over the distances of a call, in the order in which tiles read them.

    content: [B, H, Tq, D], or None for the queries. bias [H or 1, R], keys [H or 1, R, D] and values
    [H or 1, R, Dv] are ordered by key slot minus query slot, ascending from `-greatest`. queries
    [H or 1, R, D], the factors of the keys, are ordered by query slot minus key slot, ascending from `least`.
    """

    least: int
    greatest: int
    content: Tensor | None = None
    bias: Tensor | None = None
    keys: Tensor | None = None
    values: Tensor | None = None
    queries: Tensor | None = None

    @staticmethod
    def from_relative(relative: Relative, items: Sequence[WorkItem], offset: int) -> "DistanceTables":
        """Return differentiable tables over the distances in the work items of a call."""
        tiles = [tile for item in items for row in item.rows for tile in row]
        least = min((tile.start + offset - tile.keys[-1][1] + 1 for tile in tiles), default=0)
        greatest = max((tile.stop - 1 + offset - tile.keys[0][0] for tile in tiles), default=0)
        # Products are rounded up to whole steps and may read entries beyond the distances of a tile.
        least, greatest = least - STEP, greatest + STEP
        tables = relative.over(least, greatest).tables
        flipped = {name.removeprefix("position_"): table.flip(1) for name, table in tables.items()}
        if "queries" in flipped:
            flipped["queries"] = tables["position_queries"]
        content = relative.content if "keys" in flipped else None
        return DistanceTables(least, greatest, content=content, **flipped)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are not None, by name."""
        return {name: tensor for name in NAMES if (tensor := getattr(self, name)) is not None}

    def with_tensors(self, tensors: Sequence[Tensor]) -> "DistanceTables":
        """Return the same tables with other tensors, in the order of `tensors`."""
        return dataclasses.replace(self, **dict(zip(self.tensors, tensors)))

    def zero_gradients(self, needed: Sequence[bool]) -> "DistanceTables":
        """Return zeros for the tensors that need gradients, in their order."""
        # zeros_like would keep the order of the axes in memory, but work items write to views of the zeros.
        zeros = [x.new_zeros(x.shape) if need else None for x, need in zip(self.tensors.values(), needed)]
        return dataclasses.replace(self, **dict(zip(self.tensors, zeros)))

    def scaled(self, scale: float, like: "DistanceTables") -> list[Tensor | None]:
        """Return the gradients in the order of the tensors of `like`, multiplied by `scale`.

        The gradients of bias and values are not scaled: `scale` does not apply to them in the forward pass.
        """
        grads = [getattr(self, name) for name in like.tensors]
        for name, grad in zip(like.tensors, grads):
            if grad is not None and name not in ("bias", "values"):
                grad.mul_(scale)
        return grads


def entries(queries: int, keys: int) -> int:
    """Return the number of distances in a product for a tile, rounded up to a multiple of `STEP`."""
    return -(-(queries + keys - 1) // STEP) * STEP


def diagonals(by_distance: Tensor, width: int) -> Tensor:
    """Return contiguous x [M, Q, entries] as a view [M, Q, width] with x[i, j - i + Q - 1] at (i, j)."""
    matrices, queries, length = by_distance.shape
    # With a row stride of length - 1 each row starts one entry earlier than the row before: the - i above.
    strides = queries * length, length - 1, 1
    return by_distance.as_strided(
        (matrices, queries, width), strides, by_distance.storage_offset() + queries - 1
    )


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


class RelativeGradients(RelativeTerms):
    """The terms of a work item with their gradients `grads`, which all work items share under `lock`."""

    def __init__(
        self,
        item: WorkItem,
        tables: DistanceTables,
        grads: DistanceTables,
        lock: AbstractContextManager[Any],
    ) -> None:
        super().__init__(item, tables)
        self.grads, self.lock = grads, lock
        self.sums: dict[tuple[int, int, int], Tensor] = {}

    def add_values_gradient(
        self, grad_weights: Tensor, tile: Tile, grad_out: Tensor, weights: Tensor
    ) -> None:
        """Add the gradient through the position values to `grad_weights` [N, G * Q, K]."""
        assert self.tables.values is not None
        outs, whole, kept = (self._matrices(x, tile) for x in (grad_out, grad_weights, weights))
        for column, start, stop in columns_of(tile):
            columns = slice(column, column + stop - start)
            for group in self._matrix_groups():
                vectors = self._slice(self.tables.values, tile, start, stop, group)
                # grad_p_ij = grad_out_i . values[d], for all distances at once.
                whole[group, :, columns] += diagonals(product(outs[group], vectors.mT), stop - start)
                if self.grads.values is not None:
                    by_distance = self._spread_out(kept[group, :, columns])
                    self._add_to(
                        self.grads.values,
                        *self._range(tile, start, stop),
                        group,
                        product(by_distance.mT, outs[group]),
                    )

    def backward(
        self, tile: Tile, grad_scores: Tensor, content: Tensor, keys: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of content [M, Q, D] and keys [N, D, K] from `grad_scores` [N, G * Q, K].

        Both lack the factor `scale`, like `grads.keys` and `grads.queries`, to which the part of the tile is
        added.
        """
        whole = self._matrices(grad_scores, tile)
        grad_content = torch.zeros_like(content) if self.tables.keys is not None else None
        grad_keys = None
        if self.tables.queries is not None:
            grad_keys = grad_scores.new_zeros(len(whole), keys.shape[1], keys.shape[2])
        for column, start, stop in columns_of(tile):
            columns = slice(column, column + stop - start)
            if self.grads.bias is not None:
                self._sum_bias(tile, start, stop, whole[..., columns])
            for group in self._matrix_groups():
                # grad_content_i = sum_j g_ij keys[d]; grad_keys[d] sums over the queries of the tile.
                if grad_content is not None and self.tables.keys is not None:
                    by_distance = self._spread_out(whole[group, :, columns])
                    grad_content[group] += product(
                        by_distance, self._slice(self.tables.keys, tile, start, stop, group)
                    )
                    if self.grads.keys is not None:
                        self._add_to(
                            self.grads.keys,
                            *self._range(tile, start, stop),
                            group,
                            product(by_distance.mT, content[group]),
                        )
                # The same with the roles of queries and keys exchanged.
                if grad_keys is not None and self.tables.queries is not None:
                    by_distance = self._spread_out(whole[group, :, columns].mT)
                    vectors = self._query_slice(self.tables.queries, tile, start, stop, group)
                    grad_keys[group, columns] += product(by_distance, vectors)
                    if self.grads.queries is not None:
                        met = self._by_head(keys[:, columns], group)
                        self._add_to(
                            self.grads.queries,
                            *self._query_range(tile, start, stop),
                            group,
                            product(by_distance.mT, met),
                        )
        if grad_keys is not None:  # sum over the query heads of each key head, which are neighbours
            grad_keys = grad_keys.unflatten(0, (len(keys), -1)).sum(1).mT
        return grad_content, grad_keys

    def add_content_gradient(self, tile: Tile, grad_content: Tensor, grad_queries: Tensor) -> Tensor:
        """Store the gradient [M, Q, D] of the content of a row and return the gradient of its queries.

        If the content is the queries themselves, both gradients are added.
        """
        grad_content = grad_content.view(len(grad_queries), -1, grad_content.shape[2])
        if self.tables.content is None:
            return grad_queries.add_(grad_content)
        if self.grads.content is not None:
            self.item.put(self.item.by_query(self.grads.content), tile, grad_content)
        return grad_queries

    def finish(self) -> None:
        """Add the sums of the bias gradient to `grads.bias`; call it after the last tile of the work item."""
        for (base, queries, _), summed in self.sums.items():
            self._add_to_bias(base, queries, summed)
        self.sums.clear()

    def _sum_bias(self, tile: Tile, start: int, stop: int, grad: Tensor) -> None:
        """Add to the sum of all tiles with the same distances, or to `grads.bias` beyond the size limit."""
        key = self._base(tile, start), tile.stop - tile.start, stop - start
        grad = grad.unflatten(0, (self.rows, self.heads)).sum(0)
        if key in self.sums:
            self.sums[key] += grad
        # A sum over all tiles of a diagonal is spread out once, at the end.
        elif grad.numel() * (len(self.sums) + 1) <= KEPT:
            self.sums[key] = grad.clone()
        else:
            self._add_to_bias(*key[:2], grad)

    def _add_to_bias(self, base: int, queries: int, grad: Tensor) -> None:
        assert self.grads.bias is not None
        # [H', Q, K] -> [H', Q, entries] -> [H', entries]
        grad_bias = self._spread_out(grad).sum(1)
        with self.lock:
            total = self._heads_of(self.grads.bias)[:, base - queries + 1 :][:, : grad_bias.shape[1]]
            total += grad_bias if len(total) > 1 else grad_bias.sum(0, keepdim=True)

    def _add_to(self, grad_table: Tensor, first: int, last: int, group: slice, grad: Tensor) -> None:
        """Add the gradients of these matrices to the entries first..last of the gradient of a table."""
        with self.lock:
            # On a CPU: one matrix at a time, added to its own head.
            if group != ALL:
                grad_table[self._head(grad_table, group), first:last] += grad
                return
            grad = grad.unflatten(0, (self.rows, self.heads)).sum(0)
            total = self._heads_of(grad_table)[:, first:last]
            total += grad if len(total) == len(grad) else grad.sum(0, keepdim=True)
