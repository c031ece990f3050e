"""Kills at named operations on a run's files: whenever it dies, the run goes on and ends with the same bytes.

A few kills here; `make kills` makes 300 (the environment variable KILLS says how many).
"""

import collections
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_points import FaultPoints

from forking import processes
from polyformer.core.files import read_json, read_tensors
from polyformer.training.checkpoint import Checkpoints
from polyformer.training.recipes import Recipe, Run, fit
from polyformer.training.restore import is_intact
from tiny_recipes import tiny_recipe

KILLS = int(os.environ.get("KILLS", "16"))
KILLS_A_RUN = 3 if KILLS > 50 else 2  # one after another in one folder, before it may end
GOLDEN = (5**0.5 - 1) / 2
CLOCKS = ("seconds", "tokens_per_s")


def recipe(text: Path) -> Recipe:
    """Checkpoints at steps 2, 4 and 6 and at the best evaluations; rows of metrics at every step."""
    changes = {"saving": {"final": "best"}, "reporting": {"log_every": 1, "evaluate_every": 3}}
    return tiny_recipe(text, 6, training=changes)


def child(text: Path, out: Path, die_at: int, reports: Any) -> None:
    """Begin the run or go on with it, as its user would; die at operation `die_at`, or report all of them."""
    torch.set_num_threads(1)
    points = FaultPoints(out, die_at, lambda name: reports.send([name]))
    points.install()
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        fit(recipe(text), out, resume=(out / "recipe.yaml").is_file())
    reports.send(points.names)


def attempt(text: Path, out: Path, die_at: int) -> tuple[bool, list[str]]:
    """Whether the child came to its end; the operation it died at, or all that it made."""
    reading, writing = multiprocessing.Pipe(duplex=False)
    process = processes.Process(target=child, args=(text, out, die_at, writing))
    process.start()
    writing.close()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode == 0, reading.recv()


def contents(out: Path) -> dict[str, Any]:
    """Every file of a run, as bytes; of the metrics what is not a time."""
    record: dict[str, Any] = {
        path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()
    }
    rows = [json.loads(line) for line in record.pop("metrics.jsonl").splitlines()]
    assert len(record.pop("metrics.csv").splitlines()) == len(rows) + 1
    record["metrics"] = [{name: value for name, value in row.items() if name not in CLOCKS} for row in rows]
    return record


def check_sound(out: Path) -> int:
    """What a kill leaves is whole, file by file; returns the step of the last checkpoint."""
    checkpoints = Checkpoints(out)
    assert all(is_intact(checkpoints.path(step)) for step in checkpoints.steps())
    for name in ("run.json", "config.json", "tokenizer.json"):
        if (out / name).exists():
            read_json(out / name, dict)
    if (out / "model.safetensors").exists():
        read_tensors(out / "model.safetensors")
    if (out / "recipe.yaml").exists():
        assert Run.open(out).recipe.seed == 0
    return max(checkpoints.steps(), default=0)


def half_written(names: list[str]) -> list[int]:
    """The moments in the middle of writing a file for the first time, those outside of checkpoints first."""
    firsts = {name: number for number, name in reversed([*enumerate(names, 1)]) if name.startswith("torn ")}
    return sorted(firsts.values(), key=lambda number: ("/" in names[number - 1], number))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "lines.txt"
    path.write_text("".join(f"the line of number {i} says little\n" for i in range(30)))
    return path


def test_killed_at_named_operations(text: Path, tmp_path: Path) -> None:
    ended, names = attempt(text, tmp_path / "whole", die_at=0)
    assert ended
    whole = contents(tmp_path / "whole")
    assert len(set(names)) > 60, "the points are no longer seen"
    torn = half_written(names)
    draw, killed = random.Random(0), collections.Counter[str]()
    for number in itertools.count():
        if killed.total() >= KILLS:
            break
        out, step = tmp_path / f"run-{number}", 0
        # First in the middle of writing each file; then multiples of the golden section spread first kills
        # over the whole run. The others fall anywhere.
        moments = [torn[number] if number < len(torn) else 1 + int(number * GOLDEN % 1 * len(names))]
        moments += [draw.randint(1, len(names) // 2) for _ in range(KILLS_A_RUN - 1)]
        for die_at in moments:
            ended, died = attempt(text, out, die_at)
            if ended:
                break
            killed[died[0]] += 1
            reached = check_sound(out)
            assert reached >= step, f"{died[0]}: a checkpoint was lost"
            step = reached
        ended, _ = attempt(text, out, die_at=0)
        assert ended
        assert contents(out) == whole, f"run {number}, killed at {moments}: {list(killed)[-KILLS_A_RUN:]}"
        shutil.rmtree(out)
    operations = collections.Counter(name.split()[0] for name in killed.elements())
    print(f"{killed.total()} kills at {len(killed)} places of {len(set(names))}: {dict(operations)}")
