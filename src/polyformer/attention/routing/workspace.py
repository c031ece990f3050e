"""Memory that all tiles of a call are computed in, one after another."""

import math

import torch
from torch import Tensor

from polyformer.attention.routing.interval_tiles import Tiles


class Workspace:
    """Memory used again for every tile, by name."""

    def __init__(self, like: Tensor):
        self.like, self.held = like, dict[str, Tensor]()

    def take(self, name: str, *shape: int) -> Tensor:
        """Memory of this shape, which holds what was written to it last."""
        count = math.prod(shape)
        if name not in self.held or len(self.held[name]) < count:
            self.held[name] = self.like.new_empty(count)
        return self.held[name][:count].view(shape)

    def queries(self, x: Tensor, tile: Tiles) -> Tensor:
        """The rows of x [N, D] that belong to the queries of tiles, [n, Q, D]."""
        out = self.take("q", len(tile.queries), x.shape[1])
        return torch.index_select(x, 0, tile.queries, out=out).view(len(tile.real), -1, x.shape[1])

    def keys(self, x: Tensor, tile: Tiles) -> Tensor:
        """Those that belong to their keys, [n, L, D]."""
        out = self.take("k", len(tile.keys), x.shape[1])
        return torch.index_select(x, 0, tile.keys, out=out).view(len(tile.real), -1, x.shape[1])

    def product(self, name: str, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
        """scale * a @ b."""
        return self.take(name, len(a), a.shape[1], b.shape[2]).baddbmm_(a, b, beta=0, alpha=scale)
