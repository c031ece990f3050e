"""Builds killed at random moments, by real signals: nothing is lost, nothing doubled.

`KILLS=50 pytest -s tests/applications/retrieval/test_store_kills.py` does as many.
"""

import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_stores import TEXT, built, content

from forking import processes
from polyformer.applications.retrieval import store as building
from polyformer.applications.retrieval.entries import Manifest
from polyformer.applications.retrieval.store import merge, part_folder

KILLS = int(os.environ.get("KILLS", "3"))


def slowly(checkpoint: Path, text: Path, folder: Path, began: Any, parts: int) -> None:
    """Builds or merges, and saves after every batch."""
    torch.set_num_threads(1)
    building.COMMIT_SECONDS = 0.0
    building.BATCH_TOKENS = 64
    began.set()
    if parts:
        from polyformer.applications.retrieval import store as merging

        merging.COMMIT_SECONDS = 0.0
        merge(folder)
    else:
        built(checkpoint, text, folder)


def killed(checkpoint: Path, text: Path, folder: Path, parts: int, seed: int) -> int:
    """Go on until it is finished; every process but the last is killed. Returns how many were."""
    chance, kills = random.Random(seed), 0
    while True:
        began = processes.Event()
        process = processes.Process(target=slowly, args=(checkpoint, text, folder, began, parts))
        process.start()
        began.wait()
        if kills < KILLS:
            process.join(chance.uniform(0.0, 0.4 if parts == 0 else 0.05))
        else:
            process.join()
        if process.is_alive():
            process.kill()
            process.join()
            kills += 1
            continue
        assert process.exitcode == 0
        if Manifest.read(folder).count is not None:
            return kills


@pytest.fixture
def long_text(tmp_path: Path) -> Path:
    file = tmp_path / "long.txt"
    file.write_text(TEXT * (2 + KILLS // 5))
    return file


def test_a_build_that_is_killed_again_and_again(checkpoint: Path, long_text: Path, tmp_path: Path):
    kills = killed(checkpoint, long_text, tmp_path / "killed", 0, seed=time.time_ns() % 1000)
    building_batch, building.BATCH_TOKENS = building.BATCH_TOKENS, 64
    try:
        whole = built(checkpoint, long_text, tmp_path / "whole")
    finally:
        building.BATCH_TOKENS = building_batch
    assert content(tmp_path / "killed") == content(whole)
    assert sorted(os.listdir(tmp_path / "killed")) == sorted(os.listdir(whole))
    print(f"{kills} kills")


def test_a_merge_that_is_killed(checkpoint: Path, text: Path, tmp_path: Path):
    for folder in (tmp_path / "killed", tmp_path / "whole"):
        for part in (1, 2):
            built(checkpoint, text, part_folder(folder, part, 2), part, 2)
    merge(tmp_path / "whole")
    killed(checkpoint, text, tmp_path / "killed", 2, seed=time.time_ns() % 1000)
    assert content(tmp_path / "killed") == content(tmp_path / "whole")
