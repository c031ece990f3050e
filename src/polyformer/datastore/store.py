"""A finished store: its entries mapped from files, its index if it has one, and the search."""

import dataclasses
import math
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.files import read_json, write_json
from polyformer.datastore.entries import PROGRESS, checks, mapped_entries
from polyformer.datastore.flat import nearest, squared_distances
from polyformer.datastore.index import Index, verify_index
from polyformer.datastore.manifest import Manifest

MIXTURE = "mixture.json"
Search = Literal["auto", "flat", "index"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtureConfig(Config):
    """`weight` is the paper's lambda, `neighbours` its k; all three are chosen on validation text."""

    weight: float = 0.25
    temperature: float = 1.0
    neighbours: int = 1024

    def __post_init__(self) -> None:
        if not 0.0 <= self.weight <= 1.0:
            raise InputError(f"--lambda: expected a share from 0 to 1, got {self.weight}")
        if not (self.temperature > 0.0 and math.isfinite(self.temperature)):
            raise InputError(f"--temperature: expected a number above 0, got {self.temperature}")
        if self.neighbours < 1:
            raise InputError(f"--neighbours: expected 1 or more, got {self.neighbours}")

    @classmethod
    def chosen(
        cls,
        remembered: "MixtureConfig | None",
        weight: float | None,
        temperature: float | None,
        neighbours: int | None,
        flag: str = "--temperature",
    ) -> Self:
        """What a user asks for, over what the store remembers; `InputError` where neither says it all."""
        if remembered is None and (weight is None or temperature is None):
            raise InputError(
                f"--lambda, {flag}: expected both, or a store that remembers them from "
                "polyformer evaluate --datastore STORE --tune TEXT"
            )
        asked = {"weight": weight, "temperature": temperature, "neighbours": neighbours}
        known = {} if remembered is None else remembered.to_dict()
        return cls(**{**known, **{name: value for name, value in asked.items() if value is not None}})


class Neighbours(NamedTuple):
    """distances: [N, k], squared and exact, nearest first; infinite where there is no neighbour. values:
    [N, k], the tokens that followed."""

    distances: Tensor
    values: Tensor


class Store(Protocol):
    """What a mixture asks of a store, wherever it lies."""

    @property
    def manifest(self) -> Manifest:
        """What it is of."""
        ...

    def search(self, queries: Tensor, neighbours: int) -> Neighbours:
        """The entries nearest to queries [N, D]; as many as there are where these are fewer."""
        ...

    def mixture(self) -> MixtureConfig | None:
        """How to mix, if that was chosen for it."""
        ...

    def keep_mixture(self, config: MixtureConfig) -> None:
        """From now on that is how to mix; `InputError` where nothing can be written."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class FolderStore:
    """A store in a folder. keys: [M, D] float16. values: [M] int32. Without `index` all keys are compared."""

    folder: Path
    manifest: Manifest
    keys: np.ndarray
    values: np.ndarray
    index: Index | None = None

    def search(self, queries: Tensor, neighbours: int) -> Neighbours:
        """As for every store."""
        distances, rows = self.entries(queries, neighbours)
        values = torch.from_numpy(self.values[rows.clamp_min(0).cpu().numpy()].astype(np.int64))
        return Neighbours(distances, values.to(queries.device))

    def mixture(self) -> MixtureConfig | None:
        """As for every store."""
        file = self.folder / MIXTURE
        return MixtureConfig.from_dict(read_json(file, dict)) if file.exists() else None

    def keep_mixture(self, config: MixtureConfig) -> None:
        """As for every store."""
        write_json(self.folder / MIXTURE, config.to_dict())

    def entries(self, queries: Tensor, neighbours: int) -> tuple[Tensor, Tensor]:
        """As `search`, with the numbers of the entries in place of their tokens; -1 where there is none."""
        if self.index is None:
            return nearest(queries, self.keys, neighbours)
        return self._reranked(queries, min(neighbours, len(self.keys)), self.index)

    def _reranked(self, queries: Tensor, neighbours: int, index: Index) -> tuple[Tensor, Tensor]:
        """What the index finds, in the order of exact distances."""
        rows = index.candidates(queries, neighbours)
        distances, order = squared_distances(queries, self.keys, rows).sort(1)
        return distances[:, :neighbours], rows.gather(1, order)[:, :neighbours]


def open_folder(folder: Path, search: Search = "auto") -> FolderStore:
    """The store in `folder`, for any number of processes; `InputError` where it cannot be used.

    Some of its blocks are compared with their checksums: see `polyformer.datastore.checksums`.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: no such datastore; make one by polyformer datastore build")
    manifest = Manifest.read(folder)
    if manifest.count is None:
        begun = " (begun)" if (folder / PROGRESS).exists() else ""
        raise InputError(f"{folder}: not finished{begun}; go on by the same polyformer datastore build")
    if manifest.parts > 1:
        raise InputError(f"{folder}: part {manifest.part} of {manifest.parts}; join them by datastore merge")
    keys, values = mapped_entries(folder, manifest)
    checks(folder, manifest, (keys, values)).check_sample()
    index = None if search == "flat" else Index.read(folder, manifest)
    if search == "index" and index is None:
        raise InputError(f"{folder}: it has no index; make one by polyformer datastore index {folder}")
    return FolderStore(folder, manifest, keys, values, index)


def verify(folder: Path) -> Manifest:
    """Compare all entries of the store or part in `folder` with their checksums, and its index: its manifest.

    Raises `InputError` where it is damaged or unfinished. A store without checksums has sizes to compare.
    """
    manifest = Manifest.read(folder)
    if manifest.count is None:
        raise InputError(f"{folder}: not finished; go on by the same polyformer datastore build")
    checks(folder, manifest, mapped_entries(folder, manifest)).check_all()
    verify_index(folder, manifest)
    return manifest
