"""A row of a bench: the measured calls, their sizes and contenders, and the required speed of ours."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from polyformer.core.config import Config
from polyformer.core.errors import InputError, quote, unknown

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
