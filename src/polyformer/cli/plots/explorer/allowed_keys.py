"""The attended pairs of a call as intervals of keys for each query, which are few for a sparse pattern."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyformer.cli.plots.explorer.page import Buffers


class AllowedKeys:
    """A collector of masks, tile by tile of queries, separate for each head or shared by all heads."""

    def __init__(self, keys: int):
        self.keys = keys
        self.tiles: list[tuple[Tensor, Tensor]] = []

    def add(self, columns: Tensor, allowed: Tensor) -> None:
        """Add the mask allowed [H or 1, T, K] bool over the key slots `columns` [K]."""
        self.tiles.append((columns.cpu(), allowed.cpu()))

    def pairs(self, heads: int) -> int:
        """Return the number of pairs over all heads of a page."""
        return sum(int(mask.sum()) * heads // len(mask) for _, mask in self.tiles)

    def written(self, buffers: Buffers, heads: int) -> dict[str, Any]:
        """Return `allowed`, None for full attention, and `allowed_of_head`; equal heads share a list."""
        if all(len(columns) == self.keys and bool(mask.all()) for columns, mask in self.tiles):
            return {"allowed": None}
        shared = all(len(mask) == 1 for _, mask in self.tiles)
        lists: dict[bytes, int] = {}
        allowed, of_head = [], []
        for head in range(1 if shared else heads):
            arrays = self._intervals(head)
            key = b"|".join(array.tobytes() for array in arrays)
            if key not in lists:
                lists[key] = len(allowed)
                names = ("offsets", "starts", "stops")
                allowed.append({name: buffers.add(array) for name, array in zip(names, arrays)})
            of_head.append(lists[key])
        return {"allowed": allowed, "allowed_of_head": of_head * heads if shared else of_head}

    def _intervals(self, head: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return int32 offsets [Tq + 1], and intervals start <= key < stop, for query i from offsets[i]."""
        counts, starts, stops = [torch.zeros(1, dtype=torch.long)], [], []
        for columns, masks in self.tiles:
            mask = masks[min(head, len(masks) - 1)]
            apart = torch.ones(len(columns) + 1, dtype=torch.bool)  # gaps between the slots
            apart[1:-1] = columns[1:] != columns[:-1] + 1
            edge = torch.zeros(len(mask), 1, dtype=torch.bool)
            before, after = torch.cat([edge, mask], 1)[:, :-1], torch.cat([mask, edge], 1)[:, 1:]
            first = mask & (~before | apart[:-1])
            last = mask & (~after | apart[1:])
            counts.append(first.sum(1))
            starts.append(columns[first.nonzero()[:, 1]])
            stops.append(columns[last.nonzero()[:, 1]] + 1)
        return (
            torch.cat(counts).cumsum(0).int().numpy(),
            torch.cat(starts).int().numpy(),
            torch.cat(stops).int().numpy(),
        )
