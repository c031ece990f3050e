"""Runs of a gallery side by side, each in a process of its own: what fails or is killed stops no other."""

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

from polyformer.bench.gallery.jobs import Job

LOG = "log.txt"
"""What a run has printed, all calls one after another."""

PROGRAM = ("-m", "polyformer.bench.gallery.job")
"""What Python runs in each process."""

PATIENCE = 20
"""Seconds that a run gets to save a checkpoint when it is stopped."""


class Processes:
    """At most `at_once` processes at a time, each with its share of the cores.

    Their standard input is a pipe, by whose end they notice that this process is gone.
    """

    def __init__(self, at_once: int):
        self.at_once = at_once
        self.threads = max(1, (os.cpu_count() or 1) // at_once)
        self.lock, self.running, self.stopping = threading.Lock(), set[subprocess.Popen[str]](), False

    def run(self, jobs: Sequence[Job], ended: Callable[[Job, str], None]) -> None:
        """Run all; `ended` gets each as it ends, with what went wrong or "". Those `alone` come last.

        A KeyboardInterrupt stops what runs, lets it save, and is raised again.
        """
        alone = [job for job in jobs if job.of.experiment.alone]
        together = [job for job in jobs if not job.of.experiment.alone]
        for part, at_once in ((together, self.at_once), (alone, 1)):
            with self._pool(at_once) as pool:
                waiting: dict[Future[str], Job] = {pool.submit(self._one, job): job for job in part}
                while waiting:
                    done, _ = wait(waiting, return_when=FIRST_COMPLETED)
                    for future in done:
                        ended(waiting.pop(future), future.result())

    @contextmanager
    def _pool(self, at_once: int) -> Iterator[ThreadPoolExecutor]:
        pool = ThreadPoolExecutor(at_once)
        try:
            yield pool
        finally:
            self.stopping = sys.exc_info()[0] is not None
            pool.shutdown(wait=False, cancel_futures=True)
            self._stop()
            pool.shutdown()

    def _one(self, job: Job) -> str:
        assert job.config is not None
        job.folder.mkdir(parents=True, exist_ok=True)
        order = json.dumps({"name": job.of.name, "settings": job.config.to_dict()})
        environment = {**os.environ, "OMP_NUM_THREADS": str(self.threads), "PYTHONUNBUFFERED": "1"}
        with (job.folder / LOG).open("a", encoding="utf-8") as log:
            with self.lock:
                if self.stopping:
                    return "not begun"
                process = subprocess.Popen(
                    [sys.executable, *PROGRAM],
                    **{"stdin": subprocess.PIPE, "stdout": log, "stderr": subprocess.STDOUT},
                    text=True,
                    env=environment,
                    start_new_session=True,  # Ctrl-C reaches it through this process alone
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
        return why(status, job.folder / LOG)

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
    """Why a process ended so, "" for one that came to its end."""
    if status == 0:
        return ""
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["nothing was printed"]
    return lines[-1].removeprefix("polyformer: ")[:300]
