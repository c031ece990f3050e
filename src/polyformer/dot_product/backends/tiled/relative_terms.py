"""Relative terms, tile by tile: products with the vectors of a tile's distances, read along diagonals.

The Q queries and K keys of a tile are Q + K - 1 distances apart. With `bands[i, m]` what query i makes of
distance m, score (i, j) needs `bands[i, j - i + Q - 1]`: a view of the product whose rows are one entry
shorter than they are, so nothing is gathered (the shift of Dai et al. 2019, appendix B, without the copy).
"""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from polyformer.dot_product.backends.tiled.tiles import Tile
from polyformer.dot_product.backends.tiled.work_items import Part
from polyformer.dot_product.relative import Relative
from polyformer.ops.products import product

NAMES = "content", "bias", "keys", "values", "turned"
ALL = slice(None)
STEP = 16
"""Products of so many columns, or a multiple, run fastest; so far the tables go beyond the distances."""

KEPT = 1 << 22
"""Entries of bias tiles that a part keeps: those of a window are the same all along the diagonal."""


@dataclasses.dataclass(frozen=True, eq=False)
class Bands:
    """`Relative` over the distances that a call looks at, in the order in which tiles read it.

    content: [B, H, Tq, D] or None, where it is the queries. bias [H or 1, R], keys [H or 1, R, D] and values
    [H or 1, R, Dv] have their entries by key slot minus query slot, rising from `-greatest`; turned
    [H or 1, R, D], what the keys meet, by query slot minus key slot, rising from `least`.
    """

    least: int
    greatest: int
    content: Tensor | None = None
    bias: Tensor | None = None
    keys: Tensor | None = None
    values: Tensor | None = None
    turned: Tensor | None = None

    @staticmethod
    def of(relative: Relative, whole: Sequence[Part], offset: int) -> "Bands":
        """The tables over the distances that the parts of a call look at, differentiably."""
        tiles = [tile for part in whole for row in part.rows for tile in row]
        least = min((tile.start + offset - tile.keys[-1][1] + 1 for tile in tiles), default=0)
        greatest = max((tile.stop - 1 + offset - tile.keys[0][0] for tile in tiles), default=0)
        least, greatest = least - STEP, greatest + STEP
        tables = relative.over(least, greatest).tables
        flipped = {name.removeprefix("position_"): table.flip(1) for name, table in tables.items()}
        flipped.pop("queries", None)
        content = relative.content if "keys" in flipped else None
        turned = tables.get("position_queries")
        return Bands(least, greatest, content=content, turned=turned, **flipped)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Those that are there, by name."""
        return {name: tensor for name in NAMES if (tensor := getattr(self, name)) is not None}

    def gradients(self, needed: Sequence[bool]) -> "Bands":
        """Zeros for those of the tensors whose gradients are needed, in their order."""
        # Not zeros_like, which keeps the order of the axes in memory: parts write to views of these.
        zeros = [x.new_zeros(x.shape) if need else None for x, need in zip(self.tensors.values(), needed)]
        return dataclasses.replace(self, **dict(zip(self.tensors, zeros)))

    def scaled(self, scale: float, like: "Bands") -> list[Tensor | None]:
        """Gradients in the order of `like`'s tensors; the bias is added to scores that are scaled already."""
        found = [getattr(self, name) for name in like.tensors]
        for name, tensor in zip(like.tensors, found):
            if tensor is not None and name not in ("bias", "values"):
                tensor.mul_(scale)
        return found

    def of_tensors(self, tensors: Sequence[Tensor]) -> "Bands":
        """The same with other tensors, in the order of `tensors`."""
        return dataclasses.replace(self, **dict(zip(self.tensors, tensors)))


class PartBands:
    """The bands of one part: its batch rows B', its heads H'; M = B' H' matrices in a product."""

    def __init__(
        self,
        part: Part,
        bands: Bands,
        totals: Bands | None = None,
        lock: AbstractContextManager[Any] | None = None,
    ) -> None:
        self.part, self.bands, self.totals, self.lock = part, bands, totals, lock or nullcontext()
        self.offset = part.request.context.offset
        self.rows, self.heads = len(part.b), part.h.shape[1]
        self.known: dict[tuple[int, int, int], Tensor] = {}
        self.sums: dict[tuple[int, int, int], Tensor] = {}
        self.zeros: dict[tuple[int, int, int], Tensor] = {}

    def content(self, tile: Tile, queries: Tensor) -> Tensor:
        """What meets the position keys in a tile's queries [N, G * queries, D]: [M, Q, D], unscaled."""
        if self.bands.content is not None:
            queries = self.part.queries(self.part.by_query(self.bands.content), tile)
        return self._matrices(queries, tile)

    def add(self, scores: Tensor, tile: Tile, content: Tensor, keys: Tensor) -> None:
        """Adds the terms to `scores` [N, G * Q, K]; content as from `content`, keys [N, K, D]."""
        factor = self.part.factor
        whole = scores.view(self.rows * self.heads, tile.stop - tile.start, -1)
        if self.bands.keys is not None:
            content = content * factor
        for column, start, stop in _columns(tile):
            block = whole[..., column : column + stop - start]
            if self.bands.bias is not None:
                block.unflatten(0, (self.rows, self.heads)).add_(self._bias(tile, start, stop))
            for own in self._turns():
                if self.bands.keys is not None:
                    vectors = self._slice(self.bands.keys, tile, start, stop, own)
                    block[own] += diagonals(product(content[own], vectors.mT), stop - start)
                if self.bands.turned is not None:
                    vectors = self._turned(self.bands.turned, tile, start, stop, own)
                    met = self._by_head(keys[:, column : column + stop - start], own) * factor
                    block[own] += diagonals(product(met, vectors.mT), tile.stop - tile.start).mT

    def values(self, tile: Tile, weights: Tensor) -> Tensor:
        """What `weights` [N, G * Q, K] make of the position values: [N, G * Q, Dv]."""
        assert self.bands.values is not None
        seen = weights.new_zeros(self.rows * self.heads, tile.stop - tile.start, self.bands.values.shape[2])
        whole = self._matrices(weights, tile)
        for column, start, stop in _columns(tile):
            for own in self._turns():
                bands = self._spread_out(whole[own, :, column : column + stop - start])
                seen[own] += product(bands, self._slice(self.bands.values, tile, start, stop, own))
        return seen.view(len(weights), -1, seen.shape[2])

    def add_values_gradient(self, grad: Tensor, tile: Tile, grad_out: Tensor, weights: Tensor) -> None:
        """Adds to `grad` [N, G * Q, K], that of the weights, what comes through the position values."""
        assert self.bands.values is not None
        assert self.totals is not None
        outs, whole, kept = (self._matrices(x, tile) for x in (grad_out, grad, weights))
        for column, start, stop in _columns(tile):
            columns = slice(column, column + stop - start)
            for own in self._turns():
                vectors = self._slice(self.bands.values, tile, start, stop, own)
                whole[own, :, columns] += diagonals(product(outs[own], vectors.mT), stop - start)
                if self.totals.values is not None:
                    bands = self._spread_out(kept[own, :, columns])
                    self._give(self.totals.values, tile, start, stop, own, product(bands.mT, outs[own]))

    def backward(
        self, tile: Tile, grad: Tensor, content: Tensor, keys: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """From the gradient of the scores [N, G * Q, K] those of content [M, Q, D] and of keys [N, D, K].

        Both lack the scale, as do the totals of `keys` and `turned`, to which the tile's share is added.
        """
        assert self.totals is not None
        whole = self._matrices(grad, tile)
        of_content = torch.zeros_like(content) if self.bands.keys is not None else None
        of_keys = None
        if self.bands.turned is not None:
            of_keys = grad.new_zeros(len(whole), keys.shape[1], keys.shape[2])
        for column, start, stop in _columns(tile):
            columns = slice(column, column + stop - start)
            if self.totals.bias is not None:
                self._note_bias(tile, start, stop, whole[..., columns])
            for own in self._turns():
                if of_content is not None and self.bands.keys is not None:
                    bands = self._spread_out(whole[own, :, columns])
                    of_content[own] += product(bands, self._slice(self.bands.keys, tile, start, stop, own))
                    if self.totals.keys is not None:
                        self._give(self.totals.keys, tile, start, stop, own, product(bands.mT, content[own]))
                if of_keys is not None and self.bands.turned is not None:
                    bands = self._spread_out(whole[own, :, columns].mT)
                    vectors = self._turned(self.bands.turned, tile, start, stop, own)
                    of_keys[own, columns] += product(bands, vectors)
                    if self.totals.turned is not None:
                        met = self._by_head(keys[:, columns], own)
                        self._give_turned(self.totals.turned, tile, start, stop, own, product(bands.mT, met))
        if of_keys is not None:  # a key's query heads are together
            of_keys = of_keys.unflatten(0, (len(keys), -1)).sum(1).mT
        return of_content, of_keys

    def give_content(self, tile: Tile, grad: Tensor, grad_queries: Tensor) -> Tensor:
        """Puts the gradient [M, Q, D] of a row's content where it belongs; returns that of its queries."""
        grad = grad.view(len(grad_queries), -1, grad.shape[2])
        if self.bands.content is None:
            return grad_queries.add_(grad)
        assert self.totals is not None
        if self.totals.content is not None:
            self.part.put(self.part.by_query(self.totals.content), tile, grad)
        return grad_queries

    def finish(self) -> None:
        """Adds what was noted of the bias to its total: call it after the part's last tile."""
        for (base, queries, _), summed in self.sums.items():
            self._give_bias(base, queries, summed)
        self.sums.clear()

    def _note_bias(self, tile: Tile, start: int, stop: int, grad: Tensor) -> None:
        key = self._base(tile, start), tile.stop - tile.start, stop - start
        grad = grad.unflatten(0, (self.rows, self.heads)).sum(0)
        if key in self.sums:
            self.sums[key] += grad
        elif grad.numel() * (len(self.sums) + 1) <= KEPT:
            self.sums[key] = grad.clone()
        else:
            self._give_bias(*key[:2], grad)

    def _give_bias(self, base: int, queries: int, grad: Tensor) -> None:
        assert self.totals is not None
        assert self.totals.bias is not None
        found = self._spread_out(grad).sum(1)
        with self.lock:
            own = self._own(self.totals.bias)[:, base - queries + 1 :][:, : found.shape[1]]
            own += found if len(own) > 1 else found.sum(0, keepdim=True)

    def _bias(self, tile: Tile, start: int, stop: int) -> Tensor:
        """The bias of a tile's scores, [H' or 1, Q, K], in the scores' base."""
        assert self.bands.bias is not None
        queries, width = tile.stop - tile.start, stop - start
        key = self._base(tile, start), queries, width
        if key in self.known:
            return self.known[key]
        own = self._own(self.bands.bias)[:, slice(*self._range(tile, start, stop))] * self.part.base
        made = diagonals(own.unsqueeze(1).expand(-1, queries, -1).contiguous(), width)
        if made.numel() * (len(self.known) + 1) <= KEPT:
            self.known[key] = made
        return made

    def _base(self, tile: Tile, start: int) -> int:
        """The entry of a tile's first query and of the key `start`."""
        return start - tile.start - self.offset + self.bands.greatest

    def _slice(self, table: Tensor, tile: Tile, start: int, stop: int, own: slice) -> Tensor:
        """The vectors of a tile's distances, [M, Q + K - 1 or a few more, D]."""
        return self._each(table, *self._range(tile, start, stop), own)

    def _range(self, tile: Tile, start: int, stop: int) -> tuple[int, int]:
        """The entries of a tile's distances."""
        first = self._base(tile, start) - (tile.stop - tile.start) + 1
        return first, first + entries(tile.stop - tile.start, stop - start)

    def _turned(self, table: Tensor, tile: Tile, start: int, stop: int, own: slice) -> Tensor:
        """As `_slice`, for what the keys meet."""
        return self._each(table, *self._turned_range(tile, start, stop), own)

    def _turned_range(self, tile: Tile, start: int, stop: int) -> tuple[int, int]:
        first = tile.start + self.offset - start - self.bands.least - (stop - start) + 1
        return first, first + entries(tile.stop - tile.start, stop - start)

    def _give(self, total: Tensor, tile: Tile, start: int, stop: int, own: slice, grad: Tensor) -> None:
        self._sum(total, *self._range(tile, start, stop), own, grad)

    def _give_turned(
        self, total: Tensor, tile: Tile, start: int, stop: int, own: slice, grad: Tensor
    ) -> None:
        self._sum(total, *self._turned_range(tile, start, stop), own, grad)

    def _turns(self) -> list[slice]:
        """Which of the M matrices to compute together: on a CPU one, so that its bands stay in the cache."""
        matrices = self.rows * self.heads
        return [ALL] if self.part.request.q.is_cuda else [slice(i, i + 1) for i in range(matrices)]

    def _each(self, table: Tensor, first: int, last: int, own: slice) -> Tensor:
        """The entries first..last of a table [H or 1, R, D] for these matrices."""
        if own != ALL:
            return table[self._head(table, own), first:last]
        mine = self._own(table)[:, first:last].expand(self.heads, -1, -1)
        return mine.expand(self.rows, *mine.shape).flatten(0, 1)

    def _sum(self, total: Tensor, first: int, last: int, own: slice, grad: Tensor) -> None:
        """Adds the gradients of these matrices to the entries first..last of a table's."""
        with self.lock:
            if own != ALL:
                total[self._head(total, own), first:last] += grad
                return
            grad = grad.unflatten(0, (self.rows, self.heads)).sum(0)
            mine = self._own(total)[:, first:last]
            mine += grad if len(mine) == len(grad) else grad.sum(0, keepdim=True)

    def _head(self, table: Tensor, own: slice) -> slice:
        """Where a table has the head of one matrix."""
        head = 0 if len(table) == 1 else self.part.heads.start + own.start % self.heads
        return slice(head, head + 1)

    def _own(self, table: Tensor) -> Tensor:
        """The part's heads of a table, or the one that all share."""
        return table if len(table) == 1 else table[self.part.heads]

    def _by_head(self, keys: Tensor, own: slice) -> Tensor:
        """Keys [N, K, D] for the query heads of these matrices."""
        groups = self.part.request.groups
        if own != ALL:
            return keys[own.start // groups : own.start // groups + 1]
        return keys.repeat_interleave(groups, dim=0)

    def _spread_out(self, scores: Tensor) -> Tensor:
        """The inverse of `diagonals`: [M, Q, K] to [M, Q, entries], zeros where there was nothing.

        In memory that is used again: what is not on a diagonal is never written and stays zero.
        """
        matrices, queries, width = scores.shape
        bands = self.zeros.get((matrices, queries, width))
        if bands is None:
            bands = scores.new_zeros(matrices, queries, entries(queries, width))
            self.zeros[matrices, queries, width] = bands
        diagonals(bands, width).copy_(scores)
        return bands

    def _matrices(self, x: Tensor, tile: Tile) -> Tensor:
        """[N, G * Q, D] as [M, Q, D]."""
        return x.view(self.rows * self.heads, tile.stop - tile.start, x.shape[2])


def entries(queries: int, keys: int) -> int:
    """How many distances a product takes for a tile: those that there are, and a few more."""
    return -(-(queries + keys - 1) // STEP) * STEP


def diagonals(bands: Tensor, width: int) -> Tensor:
    """bands [M, Q, entries], contiguous, as a view [M, Q, width]: (i, j) is bands[i, j - i + Q - 1]."""
    matrices, queries, length = bands.shape
    strides = queries * length, length - 1, 1
    return bands.as_strided((matrices, queries, width), strides, bands.storage_offset() + queries - 1)


def _columns(tile: Tile) -> Iterator[tuple[int, int, int]]:
    """Each interval of a tile's keys, after the column where it begins."""
    column = 0
    for interval in tile.keys:
        yield column, *interval
        column += interval[1] - interval[0]
