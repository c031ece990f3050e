"""Groups of real processes at little cost: one interpreter imports torch, processes are forked from it."""

import datetime
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

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
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    ended = subprocess.run(
        [sys.executable, file], env=environment, capture_output=True, text=True, timeout=150
    )
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-4000:]
