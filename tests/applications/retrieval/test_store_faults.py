"""What can go wrong with a store on a disk: nothing is lost or doubled, and a line says what to do."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_stores import TEXT, built, content, manifest, tiny_checkpoint

from forking import processes
from full_disk import largest_file
from polyformer.applications.retrieval import open_store
from polyformer.applications.retrieval import store as building
from polyformer.applications.retrieval.readers import open_reader
from polyformer.applications.retrieval.store import build, open_folder, part_folder
from polyformer.cli.main import main
from polyformer.core.errors import InputError
from polyformer.data import TokenizerConfig, build_tokenizer
from polyformer.training.run_control import sole_writer

Complaint = Callable[..., str]


@pytest.fixture
def copied(store: Path, tmp_path: Path) -> Path:
    """A store that may be damaged, and that has been moved."""
    return Path(shutil.copytree(store, tmp_path / "elsewhere" / "store"))


def evaluate(checkpoint: Path, store: Path, text: Path) -> list[object]:
    return ["evaluate", checkpoint, "--datastore", store, "--data", text, "--lambda", 0.2, "--temperature", 1]


@pytest.mark.parametrize("name", ["keys.float16", "values.int32"])
@pytest.mark.parametrize("change", [-1, 1, None])
def test_a_truncated_store(
    name: str, change: int | None, copied: Path, checkpoint: Path, text: Path, complaint: Complaint
):
    file = copied / name
    if change is None:
        file.unlink()
    else:
        with file.open("ab") as opened:
            opened.truncate(file.stat().st_size + change)
    assert name in complaint(*evaluate(checkpoint, copied, text))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": 2}, "version"),
        ({"dtype": "float32"}, "damaged"),
        ({"dimension": -3}, "damaged"),
        ({"dimension": "wide"}, "damaged"),
        ({"count": None}, "not finished"),
        ({"parts": 2}, "part 1 of 2"),
        ({"dimension": 8}, "expected"),
    ],
)
def test_a_manifest_that_is_not_true(
    changes: dict[str, Any], said: str, copied: Path, checkpoint: Path, text: Path, complaint: Complaint
):
    tree = json.loads((copied / "store.json").read_text())
    (copied / "store.json").write_text(json.dumps({**tree, **changes}))
    assert said in complaint(*evaluate(checkpoint, copied, text))


def test_no_store(checkpoint: Path, text: Path, tmp_path: Path, complaint: Complaint):
    assert "no such datastore" in complaint(*evaluate(checkpoint, tmp_path / "none", text))
    assert "not a datastore" in complaint(*evaluate(checkpoint, tmp_path, text))
    assert "no parts" in complaint("datastore", "merge", tmp_path)


def test_another_model_and_another_tokenizer(
    store: Path, checkpoint: Path, text: Path, tmp_path: Path, complaint: Complaint
):
    other = tiny_checkpoint(tmp_path / "model", seed=1)
    assert "another model" in complaint(*evaluate(other, store, text))
    prompt = "generate", other, "--datastore", store, "--lambda", 0.5, "--knn-temperature", 1
    assert "another model" in complaint(*prompt)
    tokenizer = Path(shutil.copytree(checkpoint, tmp_path / "tokenizer"))
    build_tokenizer(TokenizerConfig(algorithm="characters"), [TEXT]).save(tokenizer)
    assert "another tokenizer" in complaint(*evaluate(tokenizer, store, text))


def test_a_moved_store_of_a_moved_model_is_the_same(
    copied: Path, store: Path, checkpoint: Path, tmp_path: Path
):
    moved = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    queries = torch.randn(3, 16)
    stores = [open_store(name, open_reader(moved, "cpu").fingerprints) for name in (copied, store)]
    first, second = (entries.search(queries, 5) for entries in stores)
    assert first.values.tolist() == second.values.tolist()


def test_a_build_goes_on_only_with_the_same_input(
    checkpoint: Path, text: Path, copied: Path, tmp_path: Path, complaint: Complaint
):
    changed = tmp_path / "changed.txt"
    changed.write_text(TEXT.replace("green", "brown"))
    build = "datastore", "build", checkpoint, changed, "--out", copied, "--length", 32, "--context", 8
    assert "started with other input (" in complaint(*build)
    other = tiny_checkpoint(tmp_path / "model", seed=1)
    assert "another model" in complaint("datastore", "build", other, text, "--out", copied, *build[6:])
    shorter = "datastore", "build", checkpoint, text, "--out", copied, "--length", 16
    assert "another reading" in complaint(*shorter)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").touch()
    assert "something else" in complaint("datastore", "build", checkpoint, text, "--out", tmp_path / "full")


def test_two_builds_into_one_folder(checkpoint: Path, text: Path, tmp_path: Path, complaint: Complaint):
    with sole_writer(tmp_path / "store"):
        assert "in use by process" in complaint(
            "datastore", "build", checkpoint, text, "--out", tmp_path / "store"
        )


def test_a_full_disk(
    checkpoint: Path, text: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Keys no longer fit after some batches; with room again the build ends as if nothing had been."""
    monkeypatch.setattr(building, "COMMIT_SECONDS", 0.0)
    monkeypatch.setattr(building, "BATCH_TOKENS", 256)
    whole = built(checkpoint, text, tmp_path / "whole")
    size = (whole / "keys.float16").stat().st_size
    for share in (0.3, 0.55, 0.8):
        with largest_file(int(size * share)), pytest.raises(InputError, match="no space left"):
            built(checkpoint, text, tmp_path / "store")
        with pytest.raises(InputError, match="not finished"):
            open_folder(tmp_path / "store")
    built(checkpoint, text, tmp_path / "store")
    assert content(tmp_path / "store") == content(whole)


def test_a_store_in_a_place_without_write_permission_is_refused(
    checkpoint: Path, text: Path, complaint: Complaint
):
    assert "cannot write /proc/store" in complaint(
        "datastore", "build", checkpoint, text, "--out", "/proc/store"
    )


def test_a_store_that_may_only_be_read(copied: Path, checkpoint: Path, text: Path):
    before = {path: path.stat().st_mtime_ns for path in copied.iterdir()}
    for path in (*before, copied):
        path.chmod(0o555)
    assert main([*map(str, evaluate(checkpoint, copied, text))]) == 0
    assert {path: path.stat().st_mtime_ns for path in copied.iterdir()} == before
    copied.chmod(0o755)


def test_parts_that_are_missing_or_of_another_text(
    checkpoint: Path, text: Path, tmp_path: Path, complaint: Complaint
):
    built(checkpoint, text, part_folder(tmp_path, 2, 2), 2, 2)
    assert "missing: [1]" in complaint("datastore", "merge", tmp_path)
    other = tmp_path / "other.txt"
    other.write_text(TEXT[:-40])
    built(checkpoint, other, part_folder(tmp_path, 1, 2), 1, 2)
    assert "other input" in complaint("datastore", "merge", tmp_path)
    shutil.rmtree(part_folder(tmp_path, 1, 2))
    part = built(checkpoint, text, part_folder(tmp_path, 1, 2), 1, 2)
    os.truncate(part / "keys.float16", 10)
    assert "keys.float16" in complaint("datastore", "merge", tmp_path)
    assert not (tmp_path / "store.json").exists()


def test_a_text_without_an_entry(checkpoint: Path, text: Path, tmp_path: Path, complaint: Complaint):
    reader = open_reader(checkpoint, "cpu")
    described = manifest(reader, text)
    with pytest.raises(InputError, match="too short: an entry requires two tokens"):
        build(reader, [], described, tmp_path / "store")
    nothing = "datastore", "build", checkpoint, tmp_path / "none.txt", "--out", tmp_path / "nothing"
    assert "no such file" in complaint(*nothing)
    assert not (tmp_path / "nothing").exists()


def searching(folder: Path, queries: torch.Tensor, results: Any, all_open: Any) -> None:
    torch.set_num_threads(1)
    entries = open_folder(folder)
    all_open.wait()
    results.put(entries.search(queries, 9).values.tolist())


def test_eight_processes_search_at_once(store: Path):
    queries, results, barrier = torch.randn(4, 16), processes.Queue(), processes.Barrier(8)
    several = [processes.Process(target=searching, args=(store, queries, results, barrier)) for _ in range(8)]
    for process in several:
        process.start()
    answers = [results.get() for _ in several]
    for process in several:
        process.join()
    assert answers == [open_folder(store).search(queries, 9).values.tolist()] * 8
