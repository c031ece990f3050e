"""The overview of a head, accumulated over tiles of queries."""

import numpy as np
import torch
from torch import Tensor

CELLS = 48
"""The most cells of a thumbnail in each direction."""


class Summaries:
    """The summaries of the heads of one call, [H, Tq, Tk] in total.

    `thumbnails` [H, R, C]: the greatest weight in each cell. `distance` [H, bins]: the share of all weight by
    distance, in bins of 0, 1, 2, 3 to 4, 5 to 8, ...; `edges` are the starts of the bins.
    """

    def __init__(self, heads: int, queries: int, keys: int, offset: int):
        self.queries, self.keys, self.offset = queries, keys, offset
        rows, columns = min(CELLS, queries), min(CELLS, keys)
        self.cells = torch.zeros(heads, rows, columns)
        self.edges = distance_edges(max(queries + abs(offset), keys))
        self.mass = torch.zeros(heads, len(self.edges), dtype=torch.float64)

    def add(self, start: int, columns: Tensor, weights: Tensor) -> None:
        """Add weights [H, T, K] of the queries from `start` on for the key slots `columns` [K]."""
        heads, count = weights.shape[:2]
        weights, columns = weights.abs().cpu(), columns.cpu()
        queries = torch.arange(start, start + count)
        _, rows, across = self.cells.shape
        cell = (queries * rows // self.queries).view(-1, 1) * across + columns * across // self.keys
        flat = self.cells.view(heads, -1)
        flat.scatter_reduce_(1, cell.flatten().expand(heads, -1), weights.flatten(1), "amax")
        distance = ((queries + self.offset).view(-1, 1) - columns).abs()
        bins = torch.bucketize(distance, torch.tensor(self.edges), right=True) - 1
        self.mass.scatter_add_(1, bins.flatten().expand(heads, -1), weights.flatten(1).double())

    @property
    def thumbnails(self) -> np.ndarray:
        """The thumbnails, uint8 [H, R, C]: the square root of the greatest weight, scaled to 255."""
        return (self.cells.clamp(0, 1).sqrt() * 255).round().byte().numpy()

    @property
    def distance(self) -> np.ndarray:
        """The distribution over distances, float32 [H, bins]; sums to 1 for each head with any weight."""
        return (self.mass / self.mass.sum(1, keepdim=True).clamp_min(1e-30)).float().numpy()


def distance_edges(longest: int) -> list[int]:
    """Return the starts of the bins, 0, 1, 2, 3, 5, 9, ...: each bin is twice as wide as the bin before."""
    edges, width = [0, 1, 2], 2
    start = 3
    while start < longest:
        edges.append(start)
        start, width = start + width, 2 * width
    return [edge for edge in edges if edge < max(1, longest)]
