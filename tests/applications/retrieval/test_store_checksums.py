"""What changes in place in a store's files is found: by `verify` a single bit, on opening what is larger."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tiny_stores import built, content

from full_disk import largest_file
from polyformer.applications.retrieval import entries
from polyformer.applications.retrieval import store as building
from polyformer.applications.retrieval.entries import CHECKSUMS, MANIFEST, EntryWriter, Manifest
from polyformer.applications.retrieval.search import IndexConfig, make_index
from polyformer.applications.retrieval.store import merge, open_folder, part_folder, verify
from polyformer.cli.main import main
from polyformer.core.errors import InputError

Complaint = Callable[..., str]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 100 entries; one of them is looked at on opening."""
    monkeypatch.setattr(entries, "BLOCK_BYTES", 100 * 32)
    monkeypatch.setattr(entries, "SAMPLE", 1)
    monkeypatch.setattr(building, "COMMIT_SECONDS", 0.0)
    monkeypatch.setattr(building, "BATCH_TOKENS", 64)


@pytest.fixture
def blocks(checkpoint: Path, text: Path, tmp_path: Path) -> Path:
    """A store of 28 blocks."""
    folder = built(checkpoint, text, tmp_path / "store")
    assert (folder / CHECKSUMS).stat().st_size == 28 * 8
    return folder


def flip(file: Path, place: int, bit: int = 0) -> None:
    """Change a bit of a file, as a bad disk may."""
    with file.open("r+b") as opened:
        opened.seek(place)
        byte = opened.read(1)[0]
        opened.seek(place)
        opened.write(bytes([byte ^ (1 << bit)]))


@pytest.mark.parametrize(
    ("name", "place", "entries"),
    [
        ("keys.float16", 0, "entries 0 to 99"),
        ("keys.float16", 777 * 32 + 5, "entries 700 to 799"),
        ("values.int32", 4 * 2748 + 3, "entries 2,700 to 2,748"),  # the last of all
    ],
)
def test_a_single_bit_is_found_by_verify(
    name: str, place: int, entries: str, blocks: Path, complaint: Complaint
):
    verify(blocks)
    flip(blocks / name, place, 3)
    said = complaint("datastore", "verify", blocks)
    assert f"{name}: {entries} are not what was written" in said
    flip(blocks / name, place, 3)
    assert main(["datastore", "verify", str(blocks)]) == 0


def test_damage_at_large_is_found_on_opening(blocks: Path):
    open_folder(blocks)
    keys = np.memmap(blocks / "keys.float16", np.uint8, "r+")
    keys[:] = np.roll(keys, 32)
    with pytest.raises(InputError, match=r"keys.float16: entries .* are not what was written"):
        open_folder(blocks)


def opens(folder: Path) -> bool:
    """Return whether a store opens without a complaint."""
    try:
        open_folder(folder)
    except InputError:
        return False
    return True


def test_each_opening_looks_at_other_blocks(blocks: Path):
    flip(blocks / "keys.float16", 3 * 3200)
    outcomes: set[bool] = set()
    openings = 0
    while len(outcomes) < 2 and openings < 2000:  # (27 / 28) ** 2000 is 3e-32
        outcomes.add(opens(blocks))
        openings += 1
    assert outcomes == {True, False}


def test_damaged_checksums(blocks: Path):
    flip(blocks / CHECKSUMS, 8)
    with pytest.raises(InputError, match="entries 100 to 199"):
        verify(blocks)
    (blocks / CHECKSUMS).unlink()
    with pytest.raises(InputError, match="no such file"):
        open_folder(blocks)


def test_a_store_of_a_time_without_checksums(blocks: Path, capsys: pytest.CaptureFixture[str]):
    tree = json.loads((blocks / MANIFEST).read_text())
    del tree["block"]
    (blocks / MANIFEST).write_text(json.dumps(tree))
    (blocks / CHECKSUMS).unlink()
    assert open_folder(blocks).manifest.count == 2749
    assert main(["datastore", "verify", str(blocks)]) == 0
    assert "the store has no checksums" in capsys.readouterr().out


@pytest.mark.parametrize("with_checksums", [True, False])
def test_a_build_that_goes_on_has_the_checksums_of_one_that_did_not_stop(
    with_checksums: bool, blocks: Path, checkpoint: Path, text: Path, tmp_path: Path
):
    """Also where it was begun by a version that made none."""
    folder, size = tmp_path / "stopped", (blocks / "keys.float16").stat().st_size
    for share in (0.31, 0.62):
        with largest_file(int(share * size)), pytest.raises(InputError, match="no space left"):
            built(checkpoint, text, folder)
        if not with_checksums:
            tree = json.loads((folder / MANIFEST).read_text())
            (folder / MANIFEST).write_text(json.dumps({**tree, "block": None}))
            (folder / CHECKSUMS).unlink()
    built(checkpoint, text, folder)
    assert content(folder) == content(blocks)
    assert (folder / CHECKSUMS).read_bytes() == (blocks / CHECKSUMS).read_bytes()
    verify(folder)


def test_checksums_are_of_what_was_to_be_written(blocks: Path, tmp_path: Path):
    """Not of what the disk gives back: that is what they are compared with."""
    manifest = Manifest.read(blocks)
    folder = tmp_path / "other"
    folder.mkdir()
    entries = open_folder(blocks)
    with EntryWriter(folder, manifest) as writer:
        writer.add(entries.keys[:150], entries.values[:150], 1)
        flip(folder / "keys.float16", 32)
        writer.add(entries.keys[150:250], entries.values[150:250], 1)
        writer.finish()
    with pytest.raises(InputError, match="entries 0 to 99"):
        verify(folder)


def test_a_merge_compares_what_it_copies(checkpoint: Path, text: Path, blocks: Path, tmp_path: Path):
    whole = tmp_path / "whole"
    for part in (1, 2):
        built(checkpoint, text, part_folder(whole, part, 2), part, 2)
    damaged = Path(shutil.copytree(whole, tmp_path / "damaged"))
    merge(whole)
    verify(whole)
    verify(part_folder(whole, 1, 2))
    flip(part_folder(damaged, 2, 2) / "keys.float16", 555 * 32, 7)
    with pytest.raises(InputError, match=r"part-2-of-2/keys.float16: entries 500 to 599"):
        merge(damaged)


def test_a_damaged_index(tmp_path: Path, complaint: Complaint):
    pytest.importorskip("faiss")
    keys = np.random.default_rng(0).normal(size=(10_000, 8)).astype(np.float16)
    described = {"model": "m", "tokenizer": "t", "key": "feedforward", "reading": {}, "text": ()}
    manifest = Manifest.from_dict({"dimension": 8, **described})
    with EntryWriter(tmp_path, manifest) as writer:
        writer.add(keys, np.zeros(len(keys), np.int32), 1)
        manifest = writer.finish()
    make_index(tmp_path, manifest, keys, IndexConfig(lists=16, neighbours=10))
    verify(tmp_path)
    flip(tmp_path / "index.faiss", (tmp_path / "index.faiss").stat().st_size - 99)
    assert "index.faiss: damaged: not what was written" in complaint("datastore", "verify", tmp_path)
