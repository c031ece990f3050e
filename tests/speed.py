"""Compare the speed and memory of this checkout with an earlier revision: `make speed BASE=REV`.

The revision is checked out in a temporary worktree and runs in the same environment. For each row three
processes take turns: new code, old code, and old code once more. Old against old is the noise. A row fails if
new code takes over 8 % more time or memory than old code, and the noise does not explain it; a row that seems
to fail is measured again first. The exit status is then 1.

With --record FILE the times relative to torch's own operations of the same run are added to a CSV file.
"""

import argparse
import contextlib
import csv
import dataclasses
import datetime
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any, NoReturn

import torch

from polyformer.core.files import write_output
from polyformer.core.measuring import new_figure, save_figure
from polyformer.core.ops.tuning import processor
from polyformer_lab.bench.rows import INSTRUCTIONS
from speed_rows import ROWS, write_checkpoint

ROOT = Path(__file__).parents[1]
ALLOWED = 1.08
"""The most that a row may take, in times or MiB of old code."""

SMALL_MIB = 8.0
"""A difference of memory that is never a fault: allocators keep pages by chance."""

ARMS = "new", "old", "again"
LONGEST = 300.0
"""The seconds after which a process counts as hanging; some compile for a minute or two."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """Median seconds of a call and peak MiB of three processes, by arm, and seconds of torch's own call."""

    seconds: dict[str, float]
    mib: dict[str, float]
    torch: float


@dataclasses.dataclass(frozen=True)
class Figures:
    """A figure of new code and of old code, their ratio with its spread, and the noise."""

    old: float
    new: float
    ratio: float
    spread: tuple[float, float]
    noise: float

    @classmethod
    def of(cls, launches: Sequence[dict[str, float]]) -> "Figures":
        """Return the figures of one or more launches."""
        pairs = [(each["new"], (each["old"] + each["again"]) / 2) for each in launches]
        ratios = [new / old for new, old in pairs]
        same = [max(each["again"] / each["old"], each["old"] / each["again"]) for each in launches]
        return cls(
            old=statistics.median(old for _, old in pairs),
            new=statistics.median(new for new, _ in pairs),
            ratio=statistics.median(ratios),
            spread=(min(ratios), max(ratios)),
            noise=max(same),
        )

    def fails(self, least: float = 0.0) -> bool:
        """Whether new code takes more than allowed, than noise explains, and by more than `least`."""
        return self.ratio > max(ALLOWED, self.noise) and self.new - self.old > least


@dataclasses.dataclass(frozen=True)
class Result:
    """What was measured of a row; `absent` says why old code cannot run it, `failure` why new code cannot."""

    row: str
    launches: tuple[Launch, ...] = ()
    absent: str = ""
    failure: str = ""

    @property
    def seconds(self) -> Figures:
        return Figures.of([launch.seconds for launch in self.launches])

    @property
    def mib(self) -> Figures:
        return Figures.of([launch.mib for launch in self.launches])

    @property
    def relative(self) -> float:
        """Seconds of new code relative to torch's own operations."""
        return statistics.median(launch.seconds["new"] / launch.torch for launch in self.launches)

    @property
    def verdict(self) -> str:
        """What the table says: "slower" and "larger" fail."""
        if self.failure or self.absent:
            return self.failure or f"not in the old code: {self.absent}"
        faults = {"slower": self.seconds.fails(), "larger": self.mib.fails(SMALL_MIB)}
        return ", ".join(name for name, fails in faults.items() if fails) or "ok"

    @property
    def fails(self) -> bool:
        return bool(self.failure) or (not self.absent and self.verdict != "ok")


class Speed:
    """A comparison of two folders that hold `src` and `lab` of a revision."""

    def __init__(self, new: Path, old: Path, limits: dict[str, str], scratch: Path) -> None:
        self.scratch, self.launches = scratch, 0
        self.listener = Listener(str(scratch / "socket"), "AF_UNIX")
        environment = os.environ | limits | {"SPEED_CHECKPOINT": str(scratch / "llama")}
        self.servers = {
            arm: subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("speed_rows.py")), str(scratch / "socket")],
                stdin=subprocess.PIPE,
                text=True,
                env=environment
                | {"PYTHONPATH": f"{folder}/src", "TORCHINDUCTOR_CACHE_DIR": f"{scratch}/{code}"},
            )
            for arm, folder, code in (("new", new, "new"), ("old", old, "old"), ("again", old, "old"))
        }

    def close(self) -> None:
        """End all processes."""
        self.listener.close()
        for server in self.servers.values():
            server.kill()
            server.wait()

    def measure(self, row: str, seconds: float, launches: int) -> Result:
        """Return the result of a row in about `seconds`; three times as long if it seems to fail."""
        result = Result(row)
        for limit in (seconds, 2 * seconds):
            end = time.monotonic() + limit
            for _ in range(launches):
                launch = self.launch(row, limit / launches / 2)
                if isinstance(launch, Result):
                    return launch
                result = dataclasses.replace(result, launches=(*result.launches, launch))
                if time.monotonic() > end and len(result.launches) > 1:  # a single one shows no spread
                    break
            if not result.fails:
                break
        return result

    def launch(self, row: str, seconds: float) -> Launch | Result:
        """Measure a row in three new processes; a result if one of them cannot run it."""
        try:
            return self._launch(row, seconds)
        except (EOFError, OSError) as error:
            return Result(row, failure=f"a process ended or does not answer ({type(error).__name__})")

    def _launch(self, row: str, seconds: float) -> Launch | Result:
        with contextlib.ExitStack() as stack:
            arms, loops, errors = self.started(row, stack)
            if errors:
                new = errors.get("new", "")
                return Result(row, absent="" if new else next(iter(errors.values())), failure=new)
            self.launches += 1
            order, taken, theirs = list(ARMS), {arm: list[float]() for arm in ARMS}, list[float]()
            end = time.monotonic() + seconds
            while not theirs or time.monotonic() < end:
                order = [*order[1:], order[0]]
                for arm in order:
                    taken[arm].append(ask(arms[arm], "ours", loops["ours"]))
                theirs.append(ask(arms["new"], "torch", loops["torch"]))
            for connection in arms.values():
                connection.send(None)
            mib = {arm: max(1.0, receive(connection)) for arm, connection in arms.items()}
        return Launch(
            {arm: statistics.median(runs) for arm, runs in taken.items()}, mib, statistics.median(theirs)
        )

    def started(
        self, row: str, stack: contextlib.ExitStack
    ) -> tuple[dict[str, Connection], dict[str, int], dict[str, str]]:
        """Return the connections of the processes by arm, loops by call, and errors by arm."""
        for arm, server in self.servers.items():
            # Each launch measures its own choices of kernels, so that a bad choice by chance is noise.
            cache = self.scratch / "cache" / f"{arm}-{self.launches % 3}"
            cache.mkdir(parents=True, exist_ok=True)
            assert server.stdin is not None
            server.stdin.write(f"{row} {arm} {cache}\n")
            server.stdin.flush()
        arms, loops, errors = {}, {}, {}
        for _ in ARMS:
            connection = stack.enter_context(self.listener.accept())
            arm, own, error = receive(connection)
            arms[arm] = connection
            loops = loops or own  # the same for all, so that leaks are compared
            if error:
                errors[arm] = error
        return arms, loops, errors


def ask(connection: Connection, call: str, loops: int) -> float:
    connection.send((call, loops))
    return receive(connection)


def receive(connection: Connection) -> Any:
    if not connection.poll(LONGEST):
        raise TimeoutError
    return connection.recv()


@contextlib.contextmanager
def worktree(revision: str, scratch: Path) -> Iterator[Path]:
    """Check a revision out for the time of the comparison."""
    folder = scratch / revision
    git("worktree", "add", "--detach", "--force", str(folder), revision)
    try:
        yield folder
    finally:
        git("worktree", "remove", "--force", str(folder))


def git(*words: str) -> str:
    """Return what git prints; a failure of git ends the program."""
    done = subprocess.run(["git", "-C", str(ROOT), *words], check=False, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip() or f"status {done.returncode}"
        stop(f"git {' '.join(words)}: {said.splitlines()[-1]}")
    return done.stdout.strip()


def stop(message: str) -> NoReturn:
    """End with status 2: a status of 1 says that a row fails."""
    print(f"speed: {message}", file=sys.stderr)
    sys.exit(2)


def day_old() -> str:
    """Return the newest commit that is a day old."""
    revision = git("rev-list", "-1", "--before=1 day ago", "HEAD")
    return revision or stop("no commit is a day old; name one with --base")


def line(result: Result) -> str:
    """Return a row of the table."""
    if not result.launches:
        return f"| {result.row} | | | | | | {result.verdict} |"
    times, mib = result.seconds, result.mib
    low, high = times.spread
    return (
        f"| {result.row} | {milliseconds(times.old)} | {milliseconds(times.new)} "
        f"| {times.ratio:.2f} ({low:.2f} to {high:.2f}) | {times.noise:.2f} "
        f"| {mib.old:.0f}, {mib.new:.0f} | {result.verdict} |"
    )


def milliseconds(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:.3f}" if value < 1 else f"{value:.3g}" if value < 1000 else f"{value:.0f}"


HEADER = """| row | old ms | new ms | new / old (spread) | old / old | peak MiB: old, new | verdict |
|---|---|---|---|---|---|---|"""


def record(file: Path, results: Sequence[Result], base: str, instructions: str) -> None:
    """Add a line to a CSV file: times relative to torch's own operations of the same run, by row."""
    facts = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": git("rev-parse", "--short=8", "HEAD"),
        "base": base,
        "processor": processor(),
        "instructions": instructions,
    }
    figures = {result.row: f"{result.relative:.3g}" for result in results if result.launches}
    lines = list(csv.DictReader(file.read_text().splitlines())) if file.exists() else []
    columns = list(dict.fromkeys([*facts, *(name for each in lines for name in each), *ROWS]))
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows([*lines, facts | figures])


def draw(file: Path) -> None:
    """Draw the history next to its file: for each row the times relative to torch, over the landings."""
    lines = list(csv.DictReader(file.read_text().splitlines()))
    last = lines[-1]["processor"], lines[-1]["instructions"]
    same = [each for each in lines if (each["processor"], each["instructions"]) == last]
    figure = new_figure(12, 10)
    figure.suptitle(f"time / time of torch's own operations, by landing: {', '.join(last)}")
    for axis, row in zip(figure.subplots(6, 5).flat, ROWS):
        points = [(number, float(each[row])) for number, each in enumerate(same, 1) if each[row]]
        axis.plot([x for x, _ in points], [y for _, y in points], marker="o")
        axis.set_title(row, fontsize=9)
        axis.set_ylim(0, 1.5 * max((y for _, y in points), default=1))
        axis.set_xticks([])
    save_figure(figure, file.with_suffix(".svg"), write_output)


def compare(
    new: Path, old: Path, rows: Sequence[str], options: argparse.Namespace, scratch: Path
) -> list[Result]:
    """Measure the rows in about the given minutes, printing each."""
    write_checkpoint(scratch / "llama")
    results = []
    speed = Speed(new, old, INSTRUCTIONS[options.isa or "default"], scratch)
    print(HEADER, flush=True)
    try:
        speed.launch(rows[0], 0)  # waits until all processes have imported torch
        for row in rows:
            compiled = "compiled" in row
            results.append(speed.measure(row, options.seconds, 1 if compiled else options.launches))
            print(line(results[-1]), flush=True)
    finally:
        speed.close()
    return results


def main() -> None:
    """Compare, print the table, and exit with 1 if a row fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", help="revision to compare with (default: the newest that is a day old)")
    parser.add_argument("--old", type=Path, help="a folder with the old code, instead of a revision")
    parser.add_argument(
        "--new", type=Path, default=ROOT, help="a folder with the new code (default: this one)"
    )
    parser.add_argument("--only", nargs="+", default=list(ROWS), choices=ROWS, metavar="ROW")
    parser.add_argument("--isa", default="", choices=["", "avx2"], help="limit the processor's instructions")
    parser.add_argument("--seconds", type=float, default=9.0, help="of a row (default: 9)")
    parser.add_argument("--launches", type=int, default=3, help="of three processes each (default: 3)")
    parser.add_argument("--record", type=Path, help="a CSV file that gets a line")
    options = parser.parse_args()
    if sys.platform == "win32":
        stop("it forks processes, which Windows cannot; run it in WSL")
    scratch = Path(tempfile.mkdtemp(prefix="speed-"))
    base = options.base or ("" if options.old else day_old())
    try:
        with contextlib.ExitStack() as stack:
            old = options.old or stack.enter_context(worktree(git("rev-parse", "--short=8", base), scratch))
            limits = options.isa or "all instructions"
            print(f"{options.new} against {options.old or old.name}, {processor()}, {limits}")
            results = compare(options.new, old, options.only, options, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if options.record is not None:
        record(options.record, results, old.name, options.isa or torch.backends.cpu.get_cpu_capability())
        draw(options.record)
    failed = [result.row for result in results if result.fails]
    print(f"{len(failed)} of {len(results)} rows fail: {', '.join(failed)}" if failed else "no row fails")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
