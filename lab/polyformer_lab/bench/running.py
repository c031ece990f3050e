"""Measurement of the rows of a bench that are not yet in its file, and the printed table.

A row is measured with its contenders in turn: medians, ratios, shares of the product speed. With instruction
sets each row is measured in a separate process: no row affects another, and a library that ends its process
ends only that row.
"""

import dataclasses
import importlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.core.config import Config
from polyformer.core.files import read_json, write_json
from polyformer.core.measuring import median, time_interleaved, time_once
from polyformer.core.ops.tuning import instruction_set, recorded
from polyformer.core.paths import check_file, is_replaceable
from polyformer.models.plugins import IMPORTED_NAMES, import_all
from polyformer_lab.bench.rows import (
    INSTRUCTIONS,
    OURS,
    SPEED,
    AbsentError,
    Bench,
    Case,
    Comparison,
    Contest,
    MeasuredCase,
    Record,
    Row,
    Seconds,
    Table,
)
from polyformer_lab.machine import begin

SHORTEST = 0.002
"""The minimum duration of a measured run in seconds: shorter calls are repeated within it."""

AGAIN = 3
"""The factor of rounds with which pairs that seem too slow are measured again in a row that reports its worst
case: the least of hundreds of medians is an accident.
"""

Calls = dict[str, Callable[[], object]]
Facts = dict[str, dict[str, float]]


def measure(row: Row, instructions: str = "default") -> Record:
    """Return the record of a row; raises errors of ours, and omits a peer that raises an error."""
    absent: dict[str, str] = {}
    measured, compared = [], []
    wide = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    asked = {**row.asked, **({} if wide else row.narrow)}
    for case in _cases(row, absent):
        calls, facts = _prepared(case, absent)
        pairs = row.pairs or [(OURS, peer) for peer in case.contenders if peer != OURS]
        pairs = [*pairs, *((ours, SPEED) for ours in case.flop)]
        results = _measured(case, calls, facts, row.repeats)
        comparisons = [*_compared(results, pairs, asked)]
        if row.worst and any(each.verdict == "short" for each in comparisons):
            results = _measured(case, calls, facts, row.repeats * AGAIN)
            comparisons = [*_compared(results, pairs, asked)]
        measured.append(results)
        compared += comparisons
        times = ", ".join(f"{name} {time(seconds.median)}" for name, seconds in results.seconds.items())
        print(f"{row.what}{case.name and '; '}{case.name}: {times}", flush=True)
    return Record(
        row=row.name,
        what=row.what,
        instructions=instructions,
        vectors=instruction_set(),
        threads=torch.get_num_threads(),
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0,
        cases=tuple(measured),
        comparisons=tuple(_worst(compared) if row.worst else compared),
        absent=absent,
        tuning=recorded(),
    )


def time(seconds: float) -> str:
    """Return a duration with its unit."""
    if seconds >= 10:
        return f"{seconds:.1f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.{0 if seconds >= 0.1 else 1}f} ms"
    return f"{seconds * 1e6:.1f} us"


def _cases(row: Row, absent: dict[str, str]) -> Iterator[Case]:
    """Yield the row's cases; none if making them requires a package that is not installed."""
    try:
        yield from row.cases()
    except ModuleNotFoundError as error:
        absent[error.name or "a package"] = _why_absent(error)


def _prepared(case: Case, absent: dict[str, str]) -> tuple[Calls, Facts]:
    """Return the calls of all contenders, each run once, with their known figures except the time."""
    calls: Calls = {}
    facts: Facts = {}
    results = {}
    for name, make in case.contenders.items():
        try:
            call = make()
            facts[name] = dict(case.facts[name]()) if name in case.facts else {}
            results[name], calls[name] = call(), call
        except Exception as error:  # an error of a peer does not end the bench
            if name in case.ours:
                raise
            reason = _why_absent(error)
            absent[name if absent.get(name, reason) == reason else f"{name} ({case.name})"] = reason
    tokens = {name: result for name, result in results.items() if isinstance(result, Tensor)}
    for name, own in tokens.items():
        if name != OURS and OURS in tokens and own.shape == tokens[OURS].shape:
            facts[name]["same tokens"] = (own == tokens[OURS]).float().mean().item()
    return calls, facts


def _why_absent(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"not installed ({error.name})"
    text = " ".join(str(error).split())[:200] or type(error).__name__
    return text if isinstance(error, AbsentError | MemoryError) else f"{type(error).__name__}: {text}"


def _measured(case: Case, calls: Calls, facts: Facts, repeats: int) -> MeasuredCase:
    products = products_at_their_best() if case.flop else {}
    loops = {name: math.ceil(SHORTEST / max(time_once(call), 1e-7)) for name, call in calls.items()}
    runs = {name: _repeated(call, loops[name]) for name, call in calls.items()}
    for product in products.values():
        product()
    rounds = time_interleaved({**runs, **products}, repeats, warmup=0)  # everything has run before
    seconds = {name: Seconds.of([run / loops[name] for run in rounds[name]]) for name in calls}
    for name, taken in seconds.items():
        facts[name] = {f"{unit}/s": amount / taken.median for unit, amount in case.work.items()} | facts[name]
    peak = max(PRODUCT_FLOP / median(rounds[name]) for name in products) if products else None
    return MeasuredCase(name=case.name, seconds=seconds, flop=dict(case.flop), facts=facts, peak=peak)


def _repeated(call: Callable[[], object], loops: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(loops):
            call()

    return run


PRODUCT = 1024, 2048, 2048
"""Rows, inputs and outputs of the product by which the speed of the machine is measured."""

PRODUCT_FLOP = 2.0 * math.prod(PRODUCT)


def products_at_their_best() -> Calls:
    """Return the same large float32 product with each library that torch has for it on a CPU."""
    rows, inputs, outputs = PRODUCT
    x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
    libraries: Calls = {"product by BLAS": lambda: F.linear(x, weight)}
    if torch.backends.mkldnn.is_available():
        onednn = torch.ops.mkldnn._linear_pointwise
        libraries["product by oneDNN"] = lambda: onednn(x, weight, None, "none", [], "")
    return libraries


def _compared(
    case: MeasuredCase, pairs: Sequence[Contest], asked: Mapping[Contest, float]
) -> Iterator[Comparison]:
    for ours, peer in pairs:
        if peer == SPEED:
            ratio = case.share(ours)
        elif ours in case.seconds and peer in case.seconds:
            ratio = case.seconds[peer].median / case.seconds[ours].median
        else:
            continue
        wanted = asked.get((ours, peer))
        yield Comparison(ours=ours, peer=peer, ratio=ratio, asked=wanted, case=case.name)


def _worst(compared: list[Comparison]) -> Iterator[Comparison]:
    """Yield for each pair the comparison with the least ratio."""
    for pair in dict.fromkeys((each.ours, each.peer) for each in compared):
        same = [each for each in compared if (each.ours, each.peer) == pair]
        yield dataclasses.replace(min(same, key=lambda each: each.ratio), worst_of=len(same))


HEAD = ("work", "ours", "beside", "its time", "ratio", "asked", "")
TIMES = ("work", "contender", "median", "fastest")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportBench(Config):
    """Files of `polyformer bench WHAT --out FILE`, as tables in Markdown, several files in turn.

    polyformer bench report --files mine.json theirs.json

    Measures nothing.
    """

    files: tuple[str, ...]


def run_report(config: ReportBench) -> str:
    """Print and return the tables."""
    text = "\n\n".join(markdown(Table.load(file)) for file in config.files)
    print(text)
    return text


def markdown(table: Table) -> str:
    """Return the machine, and for each instruction set a table of comparisons and a table of times."""
    machine, versions = table.machine, ", ".join(f"{name} {each}" for name, each in table.versions.items())
    lines = [
        f"{machine['processor']}, {machine['cores']} cores, {machine['threads']} threads; {versions}.",
        "",
        "Times are medians of rounds in which all ran in turn, in one process; ratios are theirs over ours.",
    ]
    if table.settings.get("quick"):
        lines += ["", "Measured with --quick: tiny sizes, which say that it runs and nothing of speed."]
    for instructions in dict.fromkeys(record.instructions for record in table.records):
        records = [record for record in table.records if record.instructions == instructions]
        lines += ["", *_section(instructions, records)]
    return "\n".join(lines)


def _section(instructions: str, records: list[Record]) -> Iterator[str]:
    used = next((record.vectors for record in records if record.vectors), "")
    dates = sorted(record.date[:10] for record in records)
    span = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    yield f"**{instructions}** ({used}), {span}"
    failed = ((each.what, *[""] * 5, f"failed: {each.failure}") for each in records if each.failure)
    comparisons = (_cells(each, record) for record in records for each in record.comparisons)
    yield from _columns([HEAD, *comparisons, *failed])
    yield from _columns([*_times(records)])
    for record in records:
        for name, why in record.absent.items():
            yield f"\n{record.row}: without {name}: {why}"


def _columns(rows: list[tuple[str, ...]]) -> Iterator[str]:
    """Yield the lines of a table in Markdown with aligned columns; none for a header without rows."""
    if len(rows) < 2:
        return
    yield ""
    rows = [tuple(cell.replace("|", r"\|") for cell in cells) for cells in rows]
    widths = [max(map(len, column)) for column in zip(*rows)]
    for index, cells in enumerate(rows):
        yield "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths)) + " |"
        if index == 0:
            yield "|" + "|".join("-" * (width + 2) for width in widths) + "|"


def _cells(comparison: Comparison, record: Record) -> tuple[str, ...]:
    case = next(case for case in record.cases if case.name == comparison.case)
    worst = "the worst: " if comparison.worst_of > 1 else ""
    own = time(case.seconds[comparison.ours].median)
    if comparison.ours != OURS:
        own = f"{own} ({comparison.ours.removeprefix(f'{OURS}-')})"
    speed = f"{(case.peak or 0) / 1e9:.0f} GFLOP/s"
    theirs = speed if comparison.peer == SPEED else time(case.seconds[comparison.peer].median)
    asked = "" if comparison.asked is None else f"{comparison.asked:g}"
    what = "; ".join(filter(None, (record.what, f"{worst}{case.name}")))
    return what, own, comparison.peer, theirs, f"{comparison.ratio:.2f}", asked, comparison.verdict


def _times(records: Iterable[Record]) -> Iterator[tuple[str, ...]]:
    """Yield every contender's times and figures, without the rows that report only their worst case."""
    shown = [each for each in records if all(pair.worst_of == 1 for pair in each.comparisons)]
    facts = dict.fromkeys(
        fact for each in shown for case in each.cases for known in case.facts.values() for fact in known
    )
    yield *TIMES, *facts
    for record in shown:
        for case in record.cases:
            for name, seconds in case.seconds.items():
                known = case.facts.get(name, {})
                figures = (f"{known[fact]:.4g}" if fact in known else "" for fact in facts)
                work = "; ".join(filter(None, (record.what, case.name)))
                yield work, name, time(seconds.median), time(seconds.fastest), *figures


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
