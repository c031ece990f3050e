"""The programs of the fork server end, fail, read and write as those of a new interpreter do."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forking import Program, run_python, start_python

SAY = """
import os, sys, threading, torch
SAYS = 3
print(sys.argv, sys.path[0], os.getcwd(), __name__, sys.modules["__main__"].SAYS, os.environ.get("HELLO"))
print(torch.get_num_threads(), threading.active_count(), repr(sys.stdin.read()))
print("to the error", file=sys.stderr)
"""

SLEEP = """
import pathlib, time
print("begun", flush=True)
try:
    pathlib.Path("begun").touch()
    time.sleep(1000)
except KeyboardInterrupt:
    print("stopped")
"""


def real(*words: object, cwd: Path, **options: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *map(str, words)], cwd=cwd, text=True, capture_output=True, check=False, **options
    )


@pytest.mark.parametrize("kind", ["file", "module", "code"])
def test_a_program_is_what_a_new_interpreter_runs(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The same arguments, path, folder, environment, input and threads."""
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "said.py").write_text(SAY)
    (tmp_path / "said.py").write_text(SAY)
    first = {"file": ("inner/said.py",), "module": ("-m", "said"), "code": ("-c", SAY)}[kind]
    monkeypatch.setenv("HELLO", "world")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    ours = run_python(*first, "a b", 3, cwd=tmp_path, input="two\nlines")
    expected = real(*first, "a b", 3, cwd=tmp_path, input="two\nlines")
    assert (ours.returncode, ours.stdout, ours.stderr) == (0, expected.stdout, expected.stderr)
    assert "world" in ours.stdout


@pytest.mark.parametrize(
    "code",
    ["import sys; sys.exit(7)", "raise SystemExit('why')", "raise SystemExit", "1 / 0", "import no_such"],
)
def test_it_ends_with_the_status_of_a_new_interpreter(code: str, tmp_path: Path):
    ours, expected = run_python("-c", code, cwd=tmp_path), real("-c", code, cwd=tmp_path)
    assert ours.returncode == expected.returncode
    assert ours.stderr.splitlines()[-1:] == expected.stderr.splitlines()[-1:]
    assert ("Traceback" in ours.stderr) == ("Traceback" in expected.stderr)


def test_what_runs_at_the_exit_is_run_and_all_output_arrives(tmp_path: Path):
    code = "import atexit, pathlib\natexit.register(pathlib.Path('ended').touch)\nprint('x' * 100_000)"
    assert run_python("-c", code, cwd=tmp_path).stdout == "x" * 100_000 + "\n"
    assert (tmp_path / "ended").exists()


def test_every_program_draws_other_random_numbers():
    """As new interpreters do: equal results of two processes are not by chance."""
    code = "import random, numpy, torch; print(random.random(), numpy.random.rand(), torch.rand(()).item())"
    first, second = (run_python("-c", code).stdout.split() for _ in range(2))
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_warnings_are_errors_on_demand():
    code = "import warnings\nwarnings.warn('careful')"
    ended = run_python("-W", "error", "-c", code)
    assert (ended.returncode, ended.stderr.splitlines()[-1]) == (1, "UserWarning: careful")
    assert run_python("-c", code).returncode == 0


def test_programs_change_neither_one_another_nor_the_test(tmp_path: Path):
    (tmp_path / "theirs.py").write_text("")
    run_python("-c", "import os, theirs, torch; os.environ['THEIRS'] = '1'; torch.theirs = 1", cwd=tmp_path)
    code = (
        "import os, sys, torch\n"
        "print('theirs' in sys.modules, 'THEIRS' in os.environ, hasattr(torch, 'theirs'))"
    )
    assert run_python("-c", code, env={"OURS": "1"}).stdout == "False False False\n"
    assert "OURS" not in os.environ


def begun(folder: Path) -> Program:
    program = start_python("-c", SLEEP, cwd=folder)
    while not (folder / "begun").exists():
        assert program.poll() is None
        time.sleep(0.01)
    return program


def test_a_program_that_takes_too_long_is_killed(tmp_path: Path):
    program = begun(tmp_path)
    with pytest.raises(subprocess.TimeoutExpired) as late:
        program.ended(timeout=0.01)
    assert late.value.output == "begun\n"
    assert program.poll() == -signal.SIGKILL


def test_what_it_has_started_is_killed_with_it(tmp_path: Path):
    code = "import os, subprocess\nfifo = os.open('fifo', os.O_WRONLY)\nos.write(fifo, b'begun')\n"
    code += "subprocess.run(['sleep', '60'], pass_fds=[fifo])"
    os.mkfifo(tmp_path / "fifo")
    program = start_python("-c", code, cwd=tmp_path)
    with open(tmp_path / "fifo", "rb", buffering=0) as fifo:
        assert fifo.read(5) == b"begun"
        with pytest.raises(subprocess.TimeoutExpired):
            program.ended(timeout=0.5)
        start = time.monotonic()
        assert fifo.read() == b"", "the end of the file: nobody can write to it any more"
        assert time.monotonic() - start < 50


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_signals_arrive(number: signal.Signals, tmp_path: Path):
    """SIGINT also where the suite runs in the background of a shell, which ignores it."""
    program = begun(tmp_path)
    program.send_signal(number)
    ended = program.ended()
    expected = (0, "begun\nstopped\n") if number == signal.SIGINT else (-number, "begun\n")
    assert (ended.returncode, ended.stdout) == expected
