"""Gradients of the relative terms, tile by tile.

With g_ij the gradient of the unscaled score and d the distance of query i and key j:

    score_ij = .. + content_i . keys[d] + queries[d] . k_j + bias[d]
    out_i    = sum_j p_ij (v_j + values[d])

    grad_content_i = sum_j g_ij keys[d]         grad_keys[d]    = sum over pairs at d of g_ij content_i
    grad_k_j       = sum_i g_ij queries[d]      grad_queries[d] = sum over pairs at d of g_ij k_j
    grad_bias[d]   = sum over pairs at d of g_ij
    grad_p_ij      = grad_out_i . values[d]     grad_values[d]  = sum over pairs at d of p_ij grad_out_i

Sums over pairs at a distance become products too after the tile is spread out by distance, the inverse of the
view along diagonals in the forward pass.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from polyformer.attention.functional.backends.tiled.distance_tables import DistanceTables, diagonals
from polyformer.attention.functional.backends.tiled.relative_terms import ALL, KEPT, RelativeTerms, columns_of
from polyformer.attention.functional.backends.tiled.tiles import Tile
from polyformer.attention.functional.backends.tiled.work_items import WorkItem
from polyformer.core.ops.batched_products import product


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
