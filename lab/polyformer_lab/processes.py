"""Cells in separate processes, several in parallel: a failed or killed cell does not stop the others."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path

from polyformer.core.errors import InputError
from polyformer.models.plugins import IMPORTED_NAMES, import_all
from polyformer_lab.cells import Cell

LOG = "log.txt"
"""The file with the output of a cell, for all calls in order."""

PATIENCE = 20
"""Seconds for a stopped cell to save a checkpoint."""

ORPHANED = 3
"""The exit status of a process after its parent has ended."""


THREADS = "OMP_NUM_THREADS"
"""The environment variable with the number of threads that torch uses."""


def threads_of_each(at_once: int) -> int:
    """Return the threads of each of `at_once` processes: `THREADS` if it is set, else a share of the cores.

    The cores are those that this process may use, which can be fewer than the machine has.
    """
    stated = os.environ.get(THREADS, "").partition(",")[0].strip()  # "4,2": 4 at the outer level
    if stated.isdigit() and int(stated) > 0:
        return int(stated)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // at_once)


class Processes:
    """A pool of at most `at_once` processes, each with the threads of `threads_of_each`.

    Their standard input is a pipe: its end tells them that this process has ended.
    """

    def __init__(self, at_once: int):
        self.at_once = at_once
        self.threads = threads_of_each(at_once)
        self.lock, self.running, self.stopping = threading.Lock(), set[subprocess.Popen[str]](), False

    def run(self, cells: Sequence[Cell], ended: Callable[[Cell, str], None]) -> None:
        """Run all cells; call `ended` with each cell and its problem, "" for none.

        A KeyboardInterrupt stops the processes, lets them save, and is raised again.
        """
        with self._pool() as pool:
            waiting: dict[Future[str], Cell] = {pool.submit(self._one, cell): cell for cell in cells}
            while waiting:
                done, _ = wait(waiting, return_when=FIRST_COMPLETED)
                for future in done:
                    ended(waiting.pop(future), future.result())

    @contextmanager
    def _pool(self) -> Iterator[ThreadPoolExecutor]:
        pool = ThreadPoolExecutor(self.at_once)
        try:
            yield pool
        finally:
            self.stopping = sys.exc_info()[0] is not None
            pool.shutdown(wait=False, cancel_futures=True)
            self._stop()
            pool.shutdown()

    def _one(self, cell: Cell) -> str:
        cell.folder.mkdir(parents=True, exist_ok=True)
        values = {name: getattr(cell, name) for name in ("labels", "seed", "recipe", "kind", "options")}
        order = json.dumps({**values, "folder": str(cell.folder), "imports": [*IMPORTED_NAMES]})
        environment = {**os.environ, THREADS: str(self.threads), "PYTHONUNBUFFERED": "1"}
        with (cell.folder / LOG).open("a", encoding="utf-8") as log:
            with self.lock:
                if self.stopping:
                    return "not begun"
                process = subprocess.Popen(
                    [sys.executable, "-m", __name__],
                    **{"stdin": subprocess.PIPE, "stdout": log, "stderr": subprocess.STDOUT},
                    text=True,
                    env=environment,
                    start_new_session=True,  # Ctrl-C reaches it only through this process
                )
                self.running.add(process)
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.write(order + "\n")
                process.stdin.flush()
            status = process.wait()
            with self.lock:
                self.running.discard(process)
            process.stdin.close()
        return why(status, cell.folder / LOG)

    def _stop(self) -> None:
        with self.lock:
            left = list(self.running)
        for process in left:
            process.terminate()
        for process in left:
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()


def why(status: int, log: Path) -> str:
    """Return why a process ended with this status, "" for success."""
    if status == 0:
        return ""
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["nothing was printed"]
    return lines[-1].removeprefix("polyformer: ")[:300]


def main() -> int:
    """Run the cell that the first line of standard input describes; return the exit status."""
    import torch

    order = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(int(os.environ[THREADS]))
    import_all(order.pop("imports"))
    order |= {"labels": tuple(order["labels"]), "folder": Path(order["folder"])}
    try:
        Cell(**order).run()
    except InputError as error:
        print(f"polyformer: {error}", flush=True)
        return 2
    return 0


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(ORPHANED)


if __name__ == "__main__":
    sys.exit(main())
