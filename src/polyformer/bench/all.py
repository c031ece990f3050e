"""The table that the project measures itself by, on the machine at hand: ours beside what people would take.

Every row is measured in a process of its own, with the instructions that the processor has and with AVX2
alone, which stands for the other kind of processor. With --out FILE.json what is measured is kept after every
row: the same command goes on where it was stopped, and tries again what failed.
"""

import dataclasses
from collections.abc import Iterator

import torch

from polyformer.bench.machine import begin
from polyformer.bench.table.processes import INSTRUCTIONS, in_process
from polyformer.bench.table.records import Machine, Record, Table, save, taken_up
from polyformer.bench.table.report import markdown
from polyformer.bench.table.rows import ROWS
from polyformer.core.config import Config
from polyformer.core.errors import InputError, unknown
from polyformer.training.config import at_least


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllBench(Config):
    """Peers that are not installed are named and left out; pip install 'polyformer[peers]' has them all."""

    only: tuple[str, ...] = ()  # rows by name; all without it
    quick: bool = False  # tiny sizes: does it run here?
    instruction_sets: tuple[str, ...] = tuple(INSTRUCTIONS)
    threads: int | None = None  # by default torch's own choice
    limit: int = 1800  # seconds for a row
    out: str | None = None  # JSON; also what a killed run goes on with

    def __post_init__(self) -> None:
        at_least(1, limit=self.limit, **({} if self.threads is None else {"threads": self.threads}))
        for name in self.only:
            if name not in ROWS:
                raise unknown("row", name, ROWS)
        for name in self.instruction_sets:
            if name not in INSTRUCTIONS:
                raise unknown("instruction set", name, INSTRUCTIONS)
        if not self.instruction_sets:
            raise InputError(f"instruction_sets: expected some of {', '.join(INSTRUCTIONS)}, got none")


def run(config: AllBench) -> Table:
    """Measure what is not yet in the file; print a line for each row as it is done, and the table."""
    begin(config.threads)
    table = taken_up(config.out, Machine.here(config.quick))
    if config.out is not None:
        save(config.out, table)  # a place that cannot be written is said before anything is measured
    for row, instructions in _wanted(config):
        record = table.get(row, instructions)
        how = "kept"
        if record is None:
            how = "measured"
            record = in_process(row, instructions, config.quick, config.limit)
            table = table.with_record(record)
            save(config.out, table)
        print(f"{row} ({instructions}): {how}: {_said(record)}", flush=True)
    print(f"\n{markdown(table)}")
    if config.out is not None:
        print(f"\nwritten to {config.out}")
    return table


def _wanted(config: AllBench) -> Iterator[tuple[str, str]]:
    """Rows, each under every instruction set in turn."""
    own = torch.backends.cpu.get_cpu_capability()
    sets = list(config.instruction_sets)
    if "default" in sets and "avx2" in sets and not own.startswith("AVX512"):
        print(f"avx2: left out, as the processor's own instructions are {own}")
        sets.remove("avx2")
    for row in config.only or ROWS:
        for instructions in sets:
            yield row, instructions


def _said(record: Record) -> str:
    if record.failure is not None:
        return f"failed: {record.failure}"
    said = [
        f"{comparison.ours} {comparison.ratio:.2f} of {comparison.peer}"
        + (f" ({comparison.verdict}, asked {comparison.asked:g})" if comparison.asked is not None else "")
        for comparison in record.comparisons
    ]
    return "; ".join([*said, *(f"without {name}" for name in record.absent)]) or "nothing to compare with"
