"""Groups of real processes at little cost: all are forked from the server of forking.py.

`torchrun` stands for the command of that name where a test needs neither its restarts nor its signals: three
interpreters that import torch cost more than most tests do.
"""

import datetime
import multiprocessing
import multiprocessing.connection
import os
import runpy
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from forking import run_python

Checks = Mapping[int, Sequence[Callable[[], None]]]
"""What to run on how many processes."""


def _work(rank: int, processes: int, store: str, checks: Sequence[Callable[[], None]]) -> None:
    torch.set_num_threads(1)
    wait = datetime.timedelta(seconds=60)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=processes, timeout=wait
    )
    for check in checks:
        check()
    dist.destroy_process_group()


def run_checks(checks: Checks) -> None:
    """Every group of processes in turn; raises `SystemExit` where one of them fails."""
    forked = multiprocessing.get_context("fork")
    for processes, own in checks.items():
        with tempfile.TemporaryDirectory() as folder:
            store = os.path.join(folder, "store")
            group = [forked.Process(target=_work, args=(r, processes, store, own)) for r in range(processes)]
            for process in group:
                process.start()
            for process in group:
                process.join()
            if any(process.exitcode for process in group):
                raise SystemExit(f"{processes} processes: {[process.exitcode for process in group]}")


def launch(file: str) -> None:
    """Runs a test file as a script that calls `run_checks`."""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    # On two busy cores the longest file needs three minutes; a process that hangs ends after one (`_work`).
    ended = run_python(file, env={"PYTHONPATH": path}, timeout=420)
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-4000:]


def torchrun(
    file: str, *words: object, processes: int = 2, timeout: float = 150
) -> subprocess.CompletedProcess[str]:
    """Runs a file by several processes with the environment that torchrun gives, and ends all with the first
    that fails; status 1 then."""
    path = os.pathsep.join(sys.path)
    return run_python(__file__, processes, file, *words, env={"PYTHONPATH": path}, timeout=timeout)


def _launched(processes: int, file: str) -> int:
    """The status of `torchrun`'s interpreter."""
    runpy.run_path(file, run_name="imported")  # once for all: what it imports
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    sizes = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}

    def work(rank: int) -> None:
        os.environ.update(meeting, RANK=str(rank), LOCAL_RANK=str(rank), **sizes)
        runpy.run_path(file, run_name="__main__")

    forked = multiprocessing.get_context("fork")
    group = [forked.Process(target=work, args=(r,), name=f"process {r}") for r in range(processes)]
    for process in group:
        process.start()
    running = {process.sentinel: process for process in group}
    while running:
        for sentinel in multiprocessing.connection.wait(list(running)):
            process = running.pop(sentinel)  # type: ignore[arg-type]
            process.join()
            if process.exitcode:
                print(f"{process.name} ended with status {process.exitcode}", file=sys.stderr)
                for other in running.values():
                    other.terminate()
                return 1
    return 0


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    sys.exit(_launched(int(sys.argv.pop(0)), sys.argv[0]))
