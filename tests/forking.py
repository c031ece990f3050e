"""Real processes at little cost: one server imports torch and the library, each process is forked from it.

All tests of a worker share the server, so what many of them need is imported here. `run_python` stands for a
new interpreter, but for what is read when an interpreter starts or torch is imported: options such as `-S`,
PYTHONHASHSEED, ATEN_CPU_CAPABILITY, HF_HOME. Tests of these, and of what an import loads, need a real one.
"""

import atexit
import dataclasses
import importlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

TESTS = Path(__file__).parent

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(  # of all files together: a second call would replace it
    [
        *(
            "pytest",
            "tiny_task",
            "polyformer.training.recipes",
            "polyformer.cli.main",
            "polyformer.models.transformers",
        ),
        *(
            "polyformer.data.prepared.preparing",
            "polyformer.applications.retrieval.store",
            "polyformer.models.presets",
        ),
        *("accelerate", "datasets", "torch._dynamo", "frozen_imports"),
    ]
)


@dataclasses.dataclass
class Program:
    """A running program. Its standard input, output and error are three files."""

    words: Sequence[str]
    process: multiprocessing.process.BaseProcess
    folder: tempfile.TemporaryDirectory[str]

    def poll(self) -> int | None:
        """Return the status, negative for a signal, None while the program runs."""
        return self.process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill_all(self) -> None:
        """Kill the program and what it has started, and wait for its end."""
        self._kill_group()
        self.folder.cleanup()

    def _kill_group(self) -> None:
        if self.process.pid is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()

    def ended(self, timeout: float = 150) -> "subprocess.CompletedProcess[str]":
        """Wait for the end; a program that takes longer is killed, and its output is in the error."""
        try:
            self.process.join(timeout)
        finally:  # also where the suite is interrupted: the program is in a session apart
            late = self.process.is_alive()
            if late:
                self._kill_group()
        out, error = (Path(self.folder.name, name).read_text() for name in ("stdout", "stderr"))
        self.folder.cleanup()
        if late:
            raise subprocess.TimeoutExpired(self.words, timeout, out, error)
        assert self.process.exitcode is not None
        return subprocess.CompletedProcess(self.words, self.process.exitcode, out, error)


def start_python(
    *words: object,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    input: str = "",
) -> Program:
    """Start what `python WORDS` runs: a file, `-m MODULE` or `-c CODE`, and behind it its own words.

    `-W ACTION` may stand before them. `env` is added to the environment, and torch has one thread.
    """
    folder = tempfile.TemporaryDirectory()
    Path(folder.name, "stdin").write_text(input)
    everything = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    texts = [str(word) for word in words]
    arguments = (texts, str(cwd or Path.cwd()), everything, folder.name)
    process = processes.Process(target=_child, args=arguments, name="python")
    process.start()
    return Program(texts, process, folder)


def run_python(
    *words: object,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    input: str = "",
    timeout: float = 150,
) -> "subprocess.CompletedProcess[str]":
    """Run a program to its end, as `start_python` starts it."""
    return start_python(*words, cwd=cwd, env=env, input=input).ended(timeout)


def _child(words: list[str], cwd: str, environment: Mapping[str, str], folder: str) -> None:
    """Be `python WORDS`: what is raised here ends the process as it would end an interpreter."""
    os.setsid()
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        file = os.open(os.path.join(folder, name), os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the suite runs in the background
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    torch.seed()
    np.random.seed()
    os.chdir(cwd)
    try:
        _run(words, cwd, [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry])
    finally:
        atexit._run_exitfuncs()


def _run(words: list[str], cwd: str, users_path: list[str]) -> None:
    if words[0] == "-W":
        warnings.simplefilter(words[1])  # type: ignore[arg-type]
        words = words[2:]
    option, *rest = words
    first = "" if option == "-c" else cwd if option == "-m" else os.path.dirname(os.path.abspath(option))
    sys.path[:] = [first, *users_path, *_installed(sys.path)]
    importlib.invalidate_caches()
    if option == "-c":
        sys.argv = ["-c", *rest[1:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    elif option == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(option, run_name="__main__")


def _installed(path: list[str]) -> list[str]:
    """Return the entries of a path that a new interpreter has too, not those that pytest added."""
    paths = [(Path(entry), entry) for entry in path if entry]
    return [entry for each, entry in paths if each != TESTS.parent and not each.is_relative_to(TESTS)]
