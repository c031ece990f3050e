"""Measurement of the rows of a bench that are not yet in its file, and the printed table.

With instruction sets each row is measured in a separate process: no row affects another, and a library that
ends its process ends only that row.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import torch

from polyformer.core.files import read_json, write_json
from polyformer.core.paths import check_file, is_replaceable
from polyformer.models.plugins import IMPORTED_NAMES, import_all
from polyformer_lab.bench.measuring import measure
from polyformer_lab.bench.records import Record, Table
from polyformer_lab.bench.report import markdown
from polyformer_lab.bench.rows import INSTRUCTIONS, Bench, Row
from polyformer_lab.machine import begin

B = TypeVar("B", bound=Bench)

FREE = "threads", "out", "instruction_sets", "limit", "only"
"""Settings that may differ between the records of a file; `threads` belongs to the machine."""


def run_rows(config: Bench) -> Table:
    """Measure the rows; print a line for each finished row, and the table."""
    begin(config.threads)
    settings = {name: value for name, value in config.to_dict().items() if name not in FREE}
    table = Table.here(type(config).__name__, settings).taken_up(config.out)
    if config.out is not None:
        check_file(config.out, "out")
    kept = config.out if config.out is not None and is_replaceable(Path(config.out)) else None
    table.save(kept)  # report an unwritable file before the measurements
    for row, instructions in _wanted(config):
        how = "kept"
        if table.get(row.name, instructions) is None:
            apart = config.instruction_sets
            record = in_process(config, row, instructions) if apart else measure(row)
            how = "measured" if record.failure is None else f"failed: {record.failure}"
            table = table.with_record(record)
            table.save(kept)
        print(f"{row.name} ({instructions}): {how}", flush=True)
    print(f"\n{markdown(table)}")
    if config.out is not None:
        table.save(None if kept else config.out)  # a device or a FIFO gets the whole table at the end
        print(f"\nwritten to {config.out}")
    return table


def runner(bench: type[B]) -> Callable[[B], Table]:
    """Return the function `run(config)` that the command line calls in the module of a bench."""

    def run(config: B) -> Table:
        return run_rows(config)

    run.__annotations__["config"] = bench
    return run


def _wanted(config: Bench) -> Iterator[tuple[Row, str]]:
    """Yield the rows, each under every instruction set in turn."""
    own = torch.backends.cpu.get_cpu_capability()
    sets = list(config.instruction_sets) or ["default"]
    if "default" in sets and "avx2" in sets and not own.startswith("AVX512"):
        print(f"avx2: left out, as the processor's own instructions are {own}")
        sets.remove("avx2")
    return ((row, instructions) for row in config.rows() for instructions in sets)


def in_process(config: Bench, row: Row, instructions: str) -> Record:
    """Return the row's record, with the reason in it if its process failed or exceeded its time limit."""
    with tempfile.TemporaryDirectory(prefix="polyformer-bench-") as folder:
        file = Path(folder, "record.json")
        task = {
            "module": type(config).__module__,
            "bench": type(config).__name__,
            "settings": config.to_dict(),
            "row": row.name,
            "instructions": instructions,
            "threads": torch.get_num_threads(),
            "imports": tuple(IMPORTED_NAMES),
            "file": str(file),
        }
        words = [sys.executable, "-m", "polyformer_lab.bench.running", json.dumps(task)]
        # torch's compiler does not record for which instructions it compiled its cached code: other code
        # crashes.
        compiled = {"TORCHINDUCTOR_CACHE_DIR": folder} if INSTRUCTIONS[instructions] else {}
        environment = os.environ | INSTRUCTIONS[instructions] | compiled
        try:
            done = subprocess.run(
                words,
                env=environment,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                timeout=config.limit,
            )
            failure = None if done.returncode == 0 and file.exists() else _reason(done)
        except subprocess.TimeoutExpired:
            failure = f"not done after {config.limit:g} seconds"
        if failure is None:
            return Record.from_dict(read_json(file, dict))
        return Record(row=row.name, what=row.what, instructions=instructions, failure=failure)


def _reason(done: "subprocess.CompletedProcess[str]") -> str:
    """Return the last line of the output, an exception, or the signal that ended the process."""
    if done.returncode < 0:
        return f"ended by signal {-done.returncode}"
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return lines[-1][:300] if lines else f"exit status {done.returncode}"


def main(text: str) -> None:
    """Measure the row of a task and write its record."""
    task = json.loads(text)
    torch.set_num_threads(task["threads"])
    import_all(task["imports"])
    bench: type[Bench] = getattr(importlib.import_module(task["module"]), task["bench"])
    (row,) = (row for row in bench.from_dict(task["settings"]).rows() if row.name == task["row"])
    write_json(task["file"], measure(row, task["instructions"]).to_dict())


if __name__ == "__main__":
    main(sys.argv[1])
