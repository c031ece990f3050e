"""A finished store: its memory-mapped entries, an optional index, and the search."""

import dataclasses
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from polyformer.applications.retrieval.entries import PROGRESS, Manifest, checks, mapped_entries
from polyformer.applications.retrieval.search import Index, nearest, squared_distances
from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.files import read_json, write_json
from polyformer.core.paths import checked_path
from polyformer.core.ranges import PositiveFloat, PositiveInt, Share

MIXTURE = "mixture.json"
Search = Literal["auto", "flat", "index"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtureConfig(Config):
    """Options of a mixture, tuned on validation text: `weight` is the paper's lambda, `neighbours` its k."""

    weight: Share = 0.25
    temperature: PositiveFloat = 1.0
    neighbours: PositiveInt = 1024

    @classmethod
    def chosen(
        cls,
        remembered: "MixtureConfig | None",
        weight: float | None,
        temperature: float | None,
        neighbours: int | None,
        flag: str = "--temperature",
    ) -> Self:
        """Return the user's options, completed by the store's; raises `InputError` if any is missing."""
        if remembered is None and (weight is None or temperature is None):
            raise InputError(
                f"--lambda, {flag}: expected both, or a store that remembers them from "
                "polyformer evaluate --datastore STORE --tune TEXT"
            )
        asked = {"weight": weight, "temperature": temperature, "neighbours": neighbours}
        known = {} if remembered is None else remembered.to_dict()
        return cls(**{**known, **{name: value for name, value in asked.items() if value is not None}})


class Neighbours(NamedTuple):
    """The nearest entries of some queries."""

    distances: Tensor  # [N, k], squared and exact, nearest first; infinite for missing neighbours
    values: Tensor  # [N, k], the next tokens


class Store(Protocol):
    """The interface of a store, in a folder or on a server."""

    @property
    def manifest(self) -> Manifest:
        """Return the description of the store."""
        ...

    def search(self, queries: Tensor, neighbours: int) -> Neighbours:
        """Return the entries nearest to queries [N, D]; all entries if there are fewer than `neighbours`."""
        ...

    def mixture(self) -> MixtureConfig | None:
        """Return the saved options of the mixture, if any."""
        ...

    def keep_mixture(self, config: MixtureConfig) -> None:
        """Save options of the mixture; raises `InputError` if the store cannot be written."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class FolderStore:
    """A store in a folder. keys: [M, D] float16. values: [M] int32. Without `index`, search is exhaustive."""

    folder: Path
    manifest: Manifest
    keys: np.ndarray
    values: np.ndarray
    index: Index | None = None

    def search(self, queries: Tensor, neighbours: int) -> Neighbours:
        """Return the nearest entries, see `Store.search`."""
        distances, rows = self.entries(queries, neighbours)
        values = torch.from_numpy(self.values[rows.clamp_min(0).cpu().numpy()].astype(np.int64))
        return Neighbours(distances, values.to(queries.device))

    def mixture(self) -> MixtureConfig | None:
        """Return the saved mixture, see `Store.mixture`."""
        file = self.folder / MIXTURE
        return MixtureConfig.from_dict(read_json(file, dict)) if file.exists() else None

    def keep_mixture(self, config: MixtureConfig) -> None:
        """Save the mixture, see `Store.keep_mixture`."""
        write_json(self.folder / MIXTURE, config.to_dict())

    def entries(self, queries: Tensor, neighbours: int) -> tuple[Tensor, Tensor]:
        """Search like `search`, but return the row numbers of the entries; -1 for missing neighbours."""
        if self.index is None:
            return nearest(queries, self.keys, neighbours)
        return self._reranked(queries, min(neighbours, len(self.keys)), self.index)

    def _reranked(self, queries: Tensor, neighbours: int, index: Index) -> tuple[Tensor, Tensor]:
        """Return the candidates of the index in the order of their exact distances."""
        rows = index.candidates(queries, neighbours)
        distances, order = squared_distances(queries, self.keys, rows).sort(1)
        return distances[:, :neighbours], rows.gather(1, order)[:, :neighbours]


def open_folder(folder: Path, search: Search = "auto") -> FolderStore:
    """Open the store in `folder`, for any number of processes; raises `InputError` if it cannot be used.

    Some of its blocks are compared with their checksums: see `polyformer.applications.retrieval.entries`.
    """
    if not checked_path(folder).is_dir():
        raise InputError(f"{folder}: no such datastore; build it with polyformer datastore build")
    manifest = Manifest.read(folder)
    if manifest.count is None:
        state = " (interrupted)" if (folder / PROGRESS).exists() else ""
        raise InputError(f"{folder}: not finished{state}; resume it with the same polyformer datastore build")
    if manifest.parts > 1:
        raise InputError(
            f"{folder}: part {manifest.part} of {manifest.parts}; join the parts with polyformer "
            "datastore merge"
        )
    keys, values = mapped_entries(folder, manifest)
    checks(folder, manifest, (keys, values)).check_sample()
    index = None if search == "flat" else Index.read(folder, manifest)
    if search == "index" and index is None:
        raise InputError(f"{folder}: it has no index; make it with polyformer datastore index {folder}")
    return FolderStore(folder, manifest, keys, values, index)


def verify(folder: Path) -> Manifest:
    """Compare all entries of a store or part, and its index, with their checksums; return its manifest.

    Raises `InputError` if it is damaged or unfinished. For a store without checksums only sizes are compared.
    """
    manifest = Manifest.read(folder)
    if manifest.count is None:
        raise InputError(f"{folder}: not finished; resume it with the same polyformer datastore build")
    checks(folder, manifest, mapped_entries(folder, manifest)).check_all()
    Index.read(folder, manifest)
    return manifest
