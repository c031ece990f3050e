"""Who sees whom in a call, as intervals of keys for each query: as small as the pattern is sparse."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyformer.visual.explorer.buffers import Buffers


class AllowedKeys:
    """Collects masks, a tile of queries at a time, for heads that differ or for all alike."""

    def __init__(self, keys: int):
        self.keys = keys
        self.tiles: list[tuple[Tensor, Tensor]] = []

    def add(self, columns: Tensor, allowed: Tensor) -> None:
        """allowed: [H or 1, T, K] bool over the key slots `columns` [K]."""
        self.tiles.append((columns.cpu(), allowed.cpu()))

    def pairs(self, heads: int) -> int:
        """How many a page's heads have together."""
        return sum(int(mask.sum()) * heads // len(mask) for _, mask in self.tiles)

    def written(self, buffers: Buffers, heads: int) -> dict[str, Any]:
        """`allowed` and `allowed_of_head`; heads of equal masks share a list. None where all is allowed."""
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
        """offsets [Tq + 1], and the intervals start <= key < stop of query i from offsets[i] on, int32."""
        counts, starts, stops = [torch.zeros(1, dtype=torch.long)], [], []
        for columns, masks in self.tiles:
            mask = masks[min(head, len(masks) - 1)]
            apart = torch.ones(len(columns) + 1, dtype=torch.bool)  # slots that do not follow one another
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
