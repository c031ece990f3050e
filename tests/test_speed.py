"""`make speed` finds a function that was made slower and one that keeps memory, and nothing else."""

import functools
import os
import shutil
import subprocess
import sys
from multiprocessing.connection import Listener
from pathlib import Path

import pytest

from registered import nightly
from speed import Figures, Launch, Result, draw, git, record
from speed_rows import ROWS, Call, in_a_fork, work_until_settled

ROOT = Path(__file__).parents[1]


def launches(*seconds: tuple[float, float, float]) -> tuple[Launch, ...]:
    """Launches with the seconds of new code and twice of old code; the old code takes 100 MiB."""
    mib = {"new": 100.0, "old": 100.0, "again": 100.0}
    return tuple(Launch({"new": new, "old": old, "again": again}, mib, 0.5) for new, old, again in seconds)


@pytest.mark.parametrize(
    ("seconds", "verdict"),
    [
        (((1.07, 1.0, 1.0),), "ok"),  # less than is allowed
        (((1.2, 1.0, 1.0), (1.3, 1.0, 1.02)), "slower"),
        (((1.2, 1.0, 1.0), (1.3, 1.3, 1.0)), "ok"),  # the noise explains it
        (((0.5, 1.0, 1.0),), "ok"),
    ],
)
def test_a_row_fails_if_noise_does_not_explain_the_difference(
    seconds: tuple[tuple[float, float, float], ...], verdict: str
) -> None:
    result = Result("row", launches(*seconds))
    assert result.verdict == verdict
    assert result.fails == (verdict != "ok")


@pytest.mark.parametrize(("mib", "fails"), [(105, False), (107, False), (120, True)])
def test_memory_fails_by_more_than_a_few_pages(mib: float, fails: bool) -> None:
    figures = Figures.of([{"new": mib, "old": 100.0, "again": 100.0}])
    assert figures.fails(least=8) == fails
    assert not Figures.of([{"new": 5.0, "old": 1.0, "again": 1.0}]).fails(least=8)


def test_what_only_one_revision_runs_is_said() -> None:
    assert not Result("row", absent="no such member").fails
    assert Result("row", failure="no such member").fails


def test_a_line_for_each_landing(tmp_path: Path) -> None:
    file = tmp_path / "history.csv"
    for _ in range(2):
        record(file, [Result("import", launches((1.0, 1.0, 1.0)))], "base", "avx2")
    head, *lines = file.read_text().splitlines()
    assert head.split(",")[:5] == ["date", "commit", "base", "processor", "instructions"]
    assert head.split(",")[5:] == list(ROWS)
    assert len(lines) == 2
    assert "2" in lines[0].split(",")[5:]  # twice the time of torch's own operation
    draw(file)
    assert "</svg>" in file.with_suffix(".svg").read_text()


def test_an_unknown_revision_is_no_slow_row(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        git("rev-parse", "--verify", "--quiet", "no-such-revision^{commit}^{oops}")
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_memory_is_that_of_a_process_that_measures_no_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that stores choices of kernels leaves its row to a new one, which reads them."""
    choices, processes = tmp_path / "polyformer/tuning/machine.json", tmp_path / "processes"

    def row() -> tuple[Call, Call]:
        choices.parent.mkdir(parents=True, exist_ok=True)
        choices.touch()
        with processes.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return (lambda: None), (lambda: None)

    monkeypatch.setitem(ROWS, "fake", row)
    with Listener(str(tmp_path / "socket"), "AF_UNIX") as listener:
        in_a_fork(functools.partial(work_until_settled, listener.address, "fake", "new", str(tmp_path)))
        with listener.accept() as driver:
            assert driver.recv()[0] == "new"
            driver.send(None)
            assert driver.recv() < 8
        os.wait()
    assert len(set(processes.read_text().split())) == 2


def test_a_process_that_crashes_ends_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROWS, "fake", lambda: os._exit(3))
    with Listener(str(tmp_path / "socket"), "AF_UNIX") as listener:
        in_a_fork(functools.partial(work_until_settled, listener.address, "fake", "new", str(tmp_path)))
        with listener.accept() as driver, pytest.raises(EOFError):
            driver.recv()
        os.wait()


SLOW = """
import time
_before, _kept = attend, []
def attend(*args, **options):
    time.sleep(0.005)
    return _before(*args, **options)
"""

LEAK = """
import torch
_before, _kept = attend, []
def attend(*args, **options):
    _kept.append(torch.ones(1 << 18))
    return _before(*args, **options)
"""


@nightly
@pytest.mark.parametrize(("fault", "word"), [(SLOW, "slower"), (LEAK, "larger"), ("", "ok")])
def test_a_planted_fault_is_found(fault: str, word: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "src", tmp_path / "src")
    with (tmp_path / "src/polyformer/attention/functional/attend.py").open("a") as file:
        file.write(fault)
    words = ["--new", str(tmp_path), "--old", str(ROOT), "--only", "attend-16", "--seconds", "3"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/speed.py"), *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == (word != "ok"), done.stdout + done.stderr
    assert f"{word} |" in done.stdout
