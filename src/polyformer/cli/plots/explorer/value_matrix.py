"""The attention matrix of any mechanism, and tiles of exact weights joined with a sink or with other rows."""

import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from polyformer.attention.functional.backends.definition import WeightTile


def with_sink(ordinary: Iterator[WeightTile], sink: Tensor) -> Iterator[WeightTile]:
    """Yield the tiles with the share `sink` [H, Tq], float32, of each query's weights taken off the keys."""
    for tile in ordinary:
        keys = 1 - sink[:, tile.start : tile.stop].to(tile.weights.device)
        weights, lse = tile.weights * keys.unsqueeze(2), tile.lse - keys.log()
        yield dataclasses.replace(tile, weights=weights, lse=lse)


def with_rows(
    ordinary: Iterator[WeightTile], rows: Tensor, others: Iterator[WeightTile]
) -> Iterator[WeightTile]:
    """Yield the tiles of all queries, with the queries `rows` [G] replaced by `others`; all on the CPU."""
    parts = list(others)
    for tile in ordinary:
        inside = (rows >= tile.start) & (rows < tile.stop)
        if not inside.any():
            yield tile
            continue
        keys = max(int(part.columns.max()) + 1 for part in (*parts, tile) if len(part.columns))
        whole = _over(tile, keys)
        for part in parts:
            mine = inside[part.start : part.stop].nonzero().flatten()
            places, own = rows[part.start : part.stop][mine] - tile.start, _over(part, keys)
            for table, values in zip(whole, own):
                table[:, places] = values[:, mine]
        weights, allowed, lse = whole
        yield WeightTile(tile.start, tile.stop, torch.arange(keys), weights, allowed, lse)


def _over(tile: WeightTile, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return copies of weights and allowed pairs [H, T, keys] over all keys, and of the log-sum-exps."""
    heads, queries, _ = tile.weights.shape
    weights, allowed = torch.zeros(heads, queries, keys), torch.zeros(heads, queries, keys, dtype=torch.bool)
    columns = tile.columns.cpu()
    weights[:, :, columns] = tile.weights.cpu()
    allowed[:, :, columns] = tile.allowed.expand(heads, -1, -1).cpu()
    return weights, allowed, tile.lse.cpu().clone()


Mix = Callable[[Tensor], Tensor]
"""A function from values [1, Hkv, Tk, D] to outputs [1, H, Tq, D]."""


@torch.no_grad()
def value_matrix(mix: Mix, values: Tensor) -> Tensor:
    """Return the attention matrix A [H, Tq, Tk] of any mechanism, float32: its map from values to outputs.

        y = A v + c,  c = f(q, k, 0),  so  f(q, k, I) - c = A

    for every mechanism is affine in its values, for any function of queries and keys: hashing, clusters,
    random features, compressed keys. The columns of the identity are evaluated in groups of D. `values`
    [1, Hkv, Tk, D] determine shape and type.
    """
    length, width = values.shape[-2:]
    nothing = mix(torch.zeros_like(values))
    columns = []
    for start in range(0, length, width):
        part = torch.zeros_like(values)
        index = torch.arange(start, min(start + width, length), device=values.device)
        part[..., index, index - start] = 1
        columns.append((mix(part) - nothing)[0, ..., : len(index)])
    return torch.cat(columns, -1).float()
