"""Memory shared by all tiles of a call, which are computed one after another."""

import math

import torch
from torch import Tensor

from polyformer.attention.mechanisms.routing.interval_tiles import Tiles


class Workspace:
    """Named buffers that are reused for every tile."""

    def __init__(self, like: Tensor):
        self.like, self.buffers = like, dict[str, Tensor]()

    def take(self, name: str, *shape: int) -> Tensor:
        """Return the buffer `name` with this shape; its values are what was last written to it."""
        count = math.prod(shape)
        if name not in self.buffers or len(self.buffers[name]) < count:
            self.buffers[name] = self.like.new_empty(count)
        return self.buffers[name][:count].view(shape)

    def queries(self, x: Tensor, tile: Tiles) -> Tensor:
        """Return the rows of x [N, D] for the queries of tiles, [n, Q, D]."""
        out = self.take("q", len(tile.queries), x.shape[1])
        return torch.index_select(x, 0, tile.queries, out=out).view(len(tile.real), -1, x.shape[1])

    def keys(self, x: Tensor, tile: Tiles) -> Tensor:
        """Return the rows of x [N, D] for the keys of tiles, [n, L, D]."""
        out = self.take("k", len(tile.keys), x.shape[1])
        return torch.index_select(x, 0, tile.keys, out=out).view(len(tile.real), -1, x.shape[1])

    def product(self, name: str, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
        """Return scale * a @ b in the buffer `name`."""
        return self.take(name, len(a), a.shape[1], b.shape[2]).baddbmm_(a, b, beta=0, alpha=scale)
