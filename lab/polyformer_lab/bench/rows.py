"""A row of a bench: the measured calls, their sizes and contenders, and the required speed of ours.

Measured records are kept in a file, from which a second call resumes.
"""

import dataclasses
import datetime
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from polyformer.core.config import Config
from polyformer.core.errors import InputError, quote, unknown
from polyformer.core.files import json_bytes, read_json, write_output
from polyformer.core.measuring import median
from polyformer.core.ops.tuning import processor
from polyformer.core.paths import is_replaceable
from polyformer_lab.machine import versions

OURS = "polyformer"

SPEED = "product speed"
"""The name of the peer for a call's share of the machine's product speed."""

Contest = tuple[str, str]

Make = Callable[[], Callable[[], object]]
"""A function that prepares a contender and returns the call to measure. If the contender cannot take part, it
raises `AbsentError`, or `ImportError` for a package that is not installed.
"""

DTYPES = "float32", "float64", "bfloat16", "float16"

INSTRUCTIONS: dict[str, dict[str, str]] = {
    "default": {},
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "CT2_FORCE_CPU_ISA": "AVX2",
    },
}
"""Environments that limit torch, its libraries and CTranslate2 to some instructions, read when they are
loaded. llama.cpp has no such limit: it always uses the instructions that it was compiled for.
"""


class AbsentError(Exception):
    """A contender that cannot take part here, and the reason."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Contenders that run in turn, at one size.

    ours: contenders with errors that end the bench; other contenders that fail are omitted.
    work: amounts by unit, such as {"tokens": 64}, that each call processes; reported per second.
    flop: by contender, floating-point operations of the products that a call requires at least; its speed is
    compared with the speed of products on the machine.
    facts: by contender, other figures, computed before its first call.
    """

    contenders: Mapping[str, Make]
    name: str = ""
    ours: tuple[str, ...] = (OURS,)
    work: Mapping[str, float] = dataclasses.field(default_factory=dict)
    flop: Mapping[str, float] = dataclasses.field(default_factory=dict)
    facts: Mapping[str, Callable[[], Mapping[str, float]]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Row:
    """A row. `cases` makes the sizes.

    pairs: ours and a peer, which are compared; by default `OURS` and every other contender. asked: how many
    times as fast as the peer ours should be, or its share of the `SPEED`. narrow: the same for vectors with
    less than 512 bits, if different. worst: only the case with the worst ratio is reported.
    """

    name: str
    what: str
    cases: Callable[[], Iterable[Case]]
    pairs: Sequence[Contest] | None = None
    asked: Mapping[Contest, float] = dataclasses.field(default_factory=dict)
    narrow: Mapping[Contest, float] = dataclasses.field(default_factory=dict)
    repeats: int = 5
    worst: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench(Config):
    """The settings of every bench. Numbers are 1 or more."""

    threads: int | None = None  # of a CPU; by default torch's own choice
    out: str | None = None  # FILE.json: the records, from which a killed run resumes
    instruction_sets: tuple[str, ...] = ()  # a process for each row and set; without, all in this process
    limit: int = 1800  # seconds for a row's process

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            numbers = list(value) if isinstance(value, tuple) else [value]
            if any(type(number) is int and number < 1 for number in numbers):
                raise InputError(
                    f"{field.name}: expected 1 or more, got {value if value in numbers else numbers}"
                )
        check_names("instruction set", self.instruction_sets, INSTRUCTIONS)

    def rows(self) -> Iterator[Row]:
        """Yield the rows to measure; nothing is computed yet."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceBench(Bench):
    """A bench that may run on a GPU."""

    device: str = "cpu"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names("dtype", (self.dtype,), DTYPES)
        try:
            device = torch.device(self.device)
        except RuntimeError:
            raise InputError(f"device: expected 'cpu' or 'cuda', got {quote(self.device)}") from None
        if device.type == "cuda" and not torch.cuda.is_available():
            raise InputError(
                f"device: {quote(self.device)} was requested and this machine has no CUDA device; use 'cpu'"
            )

    @property
    def place(self) -> dict[str, Any]:
        """The device and data type, as `Module.to` takes them."""
        return {"device": torch.device(self.device), "dtype": getattr(torch, self.dtype)}

    def flop(self, **amounts: float) -> dict[str, float]:
        """Return `Case.flop` if float32 products on the CPU are the reference; otherwise an empty mapping."""
        return amounts if (self.device, self.dtype) == ("cpu", "float32") else {}


def check_names(what: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raise `InputError` for the first name that is not known."""
    for name in names:
        if name not in known:
            raise unknown(what, name, known)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seconds(Config):
    """The duration of a call over several rounds."""

    median: float
    fastest: float
    slowest: float
    rounds: int

    @classmethod
    def of(cls, seconds: list[float]) -> "Seconds":
        """Return the summary of the seconds of each round."""
        middle, rounds = median(seconds), len(seconds)
        return cls(median=middle, fastest=min(seconds), slowest=max(seconds), rounds=rounds)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredCase(Config):
    """The times and other figures of all contenders. `peak`: floating-point operations per second of a large
    product in the same rounds; `flop` as in `rows.Case`.
    """

    name: str
    seconds: dict[str, Seconds]
    flop: dict[str, float] = dataclasses.field(default_factory=dict)
    facts: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    peak: float | None = None

    def share(self, contender: str) -> float:
        """Return the share of the product speed that a contender reached, 0 to 1."""
        return self.flop[contender] / self.seconds[contender].median / (self.peak or math.inf)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison(Config):
    """A comparison: `ratio` is the speed of `ours` divided by `peer`'s, or the share of the "product
    speed".
    """

    ours: str
    peer: str
    ratio: float
    asked: float | None
    case: str
    worst_of: int = 1  # cases

    @property
    def verdict(self) -> Literal["", "reached", "short"]:
        """The result: whether the target is reached, rounded to two decimal places."""
        if self.asked is None:
            return ""
        return "reached" if round(self.ratio, 2) >= self.asked else "short"


def now() -> str:
    """Return the date and time, to the second."""
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record(Config):
    """A row under an instruction set: its measurements, or the reason why it failed."""

    row: str
    what: str
    instructions: str  # "default", "avx2"
    date: str = dataclasses.field(default_factory=now)
    vectors: str = ""  # the instruction set of torch, and oneDNN's limit
    threads: int = 0
    load: float = 0.0  # load average of the last minute
    cases: tuple[MeasuredCase, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    absent: dict[str, str] = dataclasses.field(default_factory=dict)  # absent contenders, and the reasons
    tuning: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)  # the choices that were used
    failure: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table(Config):
    """All records of a bench, with their machine and settings."""

    format: Literal[2] = 2
    bench: str
    settings: dict[str, Any]
    machine: dict[str, Any]
    versions: dict[str, str]
    records: tuple[Record, ...] = ()

    @classmethod
    def here(cls, bench: str, settings: dict[str, Any]) -> "Table":
        """Return a table without records for this machine with torch's present number of threads."""
        machine = {"processor": processor(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
        return cls(bench=bench, settings=settings, machine=machine, versions=versions())

    def get(self, row: str, instructions: str) -> Record | None:
        """Return the record of a row, if there is a record that did not fail."""
        able = {(each.row, each.instructions): each for each in self.records if each.failure is None}
        return able.get((row, instructions))

    def with_record(self, record: Record) -> "Table":
        """Return the table with a record, which replaces an earlier record of its row."""
        records = {(other.row, other.instructions): other for other in self.records}
        records[record.row, record.instructions] = record
        return dataclasses.replace(self, records=tuple(records.values()))

    def save(self, file: str | Path | None) -> None:
        """Write the file atomically, if a file is given."""
        if file is not None:
            write_output(file, json_bytes(self.to_dict()))

    @classmethod
    def load(cls, file: str | Path) -> "Table":
        """Return the table in a file; raises `InputError` if it is missing, damaged or something else."""
        return cls.from_dict(read_json(file, dict), str(file))

    def taken_up(self, file: str | None) -> "Table":
        """Return this table with the file's records.

        Returns this table unchanged if there is no such file, or if it is a device or FIFO. Raises
        `InputError` if the records have another machine, version, bench or other settings.
        """
        if file is None or not Path(file).exists() or not is_replaceable(Path(file)):
            return self
        table = Table.load(file)
        both = (table, self)
        old, new = ({"bench": each.bench, **each.machine, **each.versions, **each.settings} for each in both)
        for name in {**old, **new}:
            before, after = old.get(name, "none"), new.get(name, "none")
            if before != after:
                measured = f"rows measured with {name} {before}, now it is {after}"
                raise InputError(f"out: {file} holds {measured}; name another file")
        return table
