"""IVF-PQ: what it finds, and exact distances of it; damaged indexes, and those of other keys."""

import json
import random
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from polyformer.applications.retrieval import search as indexing
from polyformer.applications.retrieval.entries import Manifest, file_checksum
from polyformer.applications.retrieval.readers import Reading
from polyformer.applications.retrieval.search import IndexConfig, make_index
from polyformer.applications.retrieval.store import FolderStore, open_folder
from polyformer.core.errors import InputError

pytest.importorskip("faiss")


@pytest.fixture(scope="module")
def clustered(tmp_path_factory: pytest.TempPathFactory) -> FolderStore:
    """12,000 keys around 60 centres, in a folder."""
    folder = tmp_path_factory.mktemp("clustered")
    generator = np.random.default_rng(0)
    centres = generator.normal(size=(60, 16)) * 4
    keys = (centres[generator.integers(0, 60, 12_000)] + generator.normal(size=(12_000, 16))).astype("f2")
    values = generator.integers(0, 99, 12_000).astype(np.int32)
    keys.tofile(folder / "keys.float16")
    values.tofile(folder / "values.int32")
    about = {"model": "m", "tokenizer": "t", "key": "feedforward", "reading": Reading(), "text": ()}
    Manifest(dimension=16, count=12_000, **about).write(folder)
    store = open_folder(folder)
    make_index(folder, store.manifest, store.keys, IndexConfig(lists=64, bytes=8, neighbours=50))
    return open_folder(folder, "index")


def queries(store: FolderStore) -> torch.Tensor:
    return torch.from_numpy(store.keys[::400].astype(np.float32)) + 0.1


def test_it_finds_most_of_the_nearest_with_few_lists(clustered: FolderStore):
    assert clustered.index is not None
    about = clustered.index.about
    assert about.probes < about.lists
    near = clustered.search(queries(clustered), 50)
    exact = open_folder(clustered.folder, "flat").search(queries(clustered), 50)
    assert about.recall > 0.9
    assert np.isclose(near.distances[:, :5], exact.distances[:, :5], rtol=1e-3).mean() > 0.9


def test_distances_are_exact_and_in_order(clustered: FolderStore):
    near = clustered.search(queries(clustered), 50)
    assert bool((near.distances.diff(dim=1) >= 0).all())
    keys = torch.from_numpy(clustered.keys.astype(np.float32))
    exact = torch.cdist(queries(clustered).double(), keys.double()).square()
    for row, distances in zip(exact, near.distances.double()):
        apart = (row[None] - distances[:, None]).abs().amin(1)
        assert float(apart.max()) < 1e-3


def test_a_damaged_index_and_that_of_other_keys(clustered: FolderStore, tmp_path: Path):
    for name in ("store.json", "keys.float16", "values.int32", "index.json", "index.faiss"):
        (tmp_path / name).write_bytes((clustered.folder / name).read_bytes())
    whole = (tmp_path / "index.faiss").read_bytes()
    (tmp_path / "index.faiss").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="damaged: not what was written; make it again"):
        open_folder(tmp_path)
    (tmp_path / "index.faiss").unlink()
    with pytest.raises(InputError, match="missing; make it again"):
        open_folder(tmp_path)
    assert open_folder(tmp_path, "flat").index is None
    about = (tmp_path / "index.json").read_text()
    (tmp_path / "index.json").write_text(about.replace('"model": "m"', '"model": "another"'))
    with pytest.raises(InputError, match="of another store's keys"):
        open_folder(tmp_path)
    (tmp_path / "index.json").unlink()
    with pytest.raises(InputError, match="it has no index"):
        open_folder(tmp_path, "index")


@pytest.fixture
def copied(clustered: FolderStore, tmp_path: Path) -> Path:
    """The store, to be damaged."""
    return Path(shutil.copytree(clustered.folder, tmp_path / "store"))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("probes", 0, "probes: expected 1 or more, got 0"),
        ("probes", -1, "probes: expected 1 or more, got -1"),
        ("probes", 65, "probes: expected at most 64, got 65"),
        ("oversample", 0.0, "oversample: expected a number from 1 to 16777216, got 0.0"),
        ("oversample", 1e300, "oversample: expected a number from 1 to 16777216, got 1e"),
        ("lists", 0, "lists: expected 1 or more, got 0"),
        ("checksum", "x", "checksum: expected"),
    ],
)
def test_numbers_that_no_index_has(name: str, value: object, said: str, copied: Path):
    about = json.loads((copied / "index.json").read_text())
    (copied / "index.json").write_text(json.dumps({**about, name: value}))
    with pytest.raises(
        InputError, match=rf"index.json: damaged \({said}.*; make it again by polyformer data"
    ):
        open_folder(copied)


def test_any_bit_that_changes_is_found_on_opening(copied: Path):
    file, draw = copied / "index.faiss", random.Random(0)
    whole = file.read_bytes()
    for _ in range(40):
        changed = bytearray(whole)
        changed[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        file.write_bytes(changed)
        with pytest.raises(InputError, match="damaged: not what was written"):
            open_folder(copied)


def test_an_index_of_another_kind(copied: Path):
    faiss = indexing.imported_faiss()
    flat = faiss.IndexFlatL2(16)
    flat.add(open_folder(copied, "flat").keys.astype(np.float32))
    faiss.write_index(flat, str(copied / "index.faiss"))
    about = json.loads((copied / "index.json").read_text())
    about["checksum"] = file_checksum(copied / "index.faiss")
    (copied / "index.json").write_text(json.dumps(about))
    with pytest.raises(InputError, match="expected an IVF-PQ index, got IndexFlat"):
        open_folder(copied)


def test_too_few_keys(store: Path):
    entries = open_folder(store)
    with pytest.raises(InputError, match="entries or more"):
        make_index(store, entries.manifest, entries.keys, IndexConfig())


def test_without_faiss_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(InputError, match=r"pip install 'polyformer\[datastore\]'"):
        indexing.imported_faiss()
