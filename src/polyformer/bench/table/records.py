"""What was measured, as it is kept in a file: a second call goes on with what is there."""

import dataclasses
import datetime
import os
from pathlib import Path
from typing import Any, Literal

import torch

from polyformer.bench.machine import versions
from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.files import read_json, write_json
from polyformer.ops.tuning.machine import processor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seconds(Config):
    """Of a call, over so many rounds."""

    median: float
    fastest: float
    slowest: float
    rounds: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredCase(Config):
    """Everyone's times. `peak`: floating-point operations a second of a large product, in the same rounds."""

    name: str
    seconds: dict[str, Seconds]
    flop: float | None = None
    tokens: int | None = None
    peak: float | None = None

    def share(self, contender: str) -> float | None:
        """How much of the product speed a contender reached, 0 to 1."""
        if self.flop is None or self.peak is None or contender not in self.seconds:
            return None
        return self.flop / self.seconds[contender].median / self.peak


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison(Config):
    """`ratio`: how many times as fast `ours` is as `peer`; `peer` "product speed": the share reached."""

    ours: str
    peer: str
    ratio: float
    asked: float | None
    case: str  # the worst

    @property
    def verdict(self) -> Literal["", "reached", "short"]:
        """Whether what is asked is reached, to two digits behind the point."""
        if self.asked is None:
            return ""
        return "reached" if round(self.ratio, 2) >= self.asked else "short"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record(Config):
    """A row under an instruction set: measured, or with the reason why it failed."""

    row: str
    instructions: str  # "default", "avx2"
    date: str
    vectors: str = ""  # what torch used, and oneDNN's limit
    threads: int = 0
    load: float = 0.0  # processes that wanted to run in the last minute, beside this
    cases: tuple[MeasuredCase, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    absent: dict[str, str] = dataclasses.field(default_factory=dict)  # who did not take part, and why
    agreement: dict[str, str] = dataclasses.field(default_factory=dict)  # whether peers gave ours' tokens
    tuning: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)  # the choices in force
    failure: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine(Config):
    """Where a file's records were measured; records of another machine go into another file."""

    processor: str
    cores: int
    threads: int
    quick: bool
    versions: dict[str, str]

    @classmethod
    def here(cls, quick: bool) -> "Machine":
        """This one, with torch's present number of threads."""
        return cls(
            processor=processor(),
            cores=os.cpu_count() or 1,
            threads=torch.get_num_threads(),
            quick=quick,
            versions=versions(),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table(Config):
    """All records."""

    format: Literal[1] = 1
    machine: Machine
    records: tuple[Record, ...] = ()

    def get(self, row: str, instructions: str) -> Record | None:
        """The record of a row, if there is one that did not fail."""
        for record in self.records:
            if (record.row, record.instructions) == (row, instructions) and record.failure is None:
                return record
        return None

    def with_record(self, record: Record) -> "Table":
        """With a record, in the place of an earlier one of its row."""
        key = record.row, record.instructions
        others = [other for other in self.records if (other.row, other.instructions) != key]
        return dataclasses.replace(self, records=(*others, record))


def today() -> str:
    """The date and time, to the second."""
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


def load(file: str | Path) -> Table:
    """What a file holds; raises `InputError` where it is missing, damaged or something else."""
    return Table.from_dict(read_json(file, dict), str(file))


def taken_up(file: str | Path | None, machine: Machine) -> Table:
    """The file's records to go on with; an empty table where there is no file yet.

    Raises `InputError` where the file's records are of another machine, size or version.
    """
    if file is None or not Path(file).exists():
        return Table(machine=machine)
    table = load(file)
    for field in dataclasses.fields(Machine):
        old, new = (getattr(which, field.name) for which in (table.machine, machine))
        if isinstance(old, dict):
            both = {*old.items()} ^ {*new.items()}
            name = min(both)[0] if both else ""
            old, new = old.get(name, "none"), new.get(name, "none")
            if both:
                raise _another(file, f"{name} {old}", new)
        elif old != new:
            raise _another(file, f"{field.name} {old}", new)
    return table


def _another(file: str | Path, old: str, new: object) -> InputError:
    return InputError(f"out: {file} holds rows measured with {old}, now it is {new}; name another file")


def save(file: str | Path | None, table: Table) -> None:
    """Write the file, whole or not at all, if one is wanted."""
    if file is not None:
        write_json(file, table.to_dict())
