"""The public package `memorizing-transformers-pytorch` in `bench store`: its KNN memory, by its CPU path.

Its requirements name `faiss-gpu`, which installs on no current Python: `pip install --no-deps
memorizing-transformers-pytorch einops einops-exts joblib filelock`, beside faiss-cpu.
"""

from pathlib import Path

import torch
from torch import Tensor

from polyformer.bench.benchmark_case import AbsentError

WAY = "pip install --no-deps memorizing-transformers-pytorch einops einops-exts joblib filelock"


class PublicStore:
    """A `KNNMemory` of one index, in one process, as its `MemorizingTransformer` makes it; `room` for so many
    entries more, since one that is full forgets all."""

    def __init__(self, keys: Tensor, values: Tensor, neighbours: int, file: Path, room: int):
        try:
            from memorizing_transformers_pytorch.knn_memory import (  # pyright: ignore[reportMissingImports]
                KNNMemory,
            )
        except ImportError as error:
            raise AbsentError(f"not installed ({WAY})") from error
        width, number = keys.shape[-1], keys.shape[1] + room
        self.neighbours = neighbours
        self.memory = KNNMemory(width, number, memmap_filename=str(file), multiprocessing=False)
        self.memory.add(torch.stack([keys, values], 2))

    def search(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [1, R, k, 2, D] of queries [1, R, D], and which of them there are."""
        return self.memory.search(queries, self.neighbours)

    def add(self, new: Tensor) -> None:
        """Entries [1, R, D] more."""
        self.memory.add(torch.stack([new, new], 2))

    def widen(self, width: int) -> None:
        """Look at so many entries in a search."""
        self.memory.knns[0].index.hnsw.efSearch = width

    def recall(self, queries: Tensor, least: Tensor) -> float:
        """The share of what is found for queries [1, R, D] whose products are no less than `least` [R], those
        of the last of the nearest."""
        entries, there = self.search(queries)
        products = torch.einsum("rd,rkd->rk", queries[0], entries[0, :, :, 0])
        return float(((products >= least.unsqueeze(1) - 1e-5) & there[0]).float().mean())
