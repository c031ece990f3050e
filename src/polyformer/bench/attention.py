"""Time and peak memory of attention alone, by length: our members beside torch and public peers.

`polyformer.bench.member` says how a member is written.
"""

import csv
import dataclasses
import functools
import io
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from polyformer.bench.benchmark_case import DENSE, AbsentError, BenchmarkCase
from polyformer.bench.contenders import PEERS, call
from polyformer.bench.machine import begin
from polyformer.bench.member import Member, density
from polyformer.bench.memory import peak_mib
from polyformer.bench.plot import line_plot
from polyformer.bench.timing import in_turn, median
from polyformer.core.config import Config
from polyformer.core.errors import InputError, quote, unknown
from polyformer.core.files import atomic_write

WARM: dict[str | None, int] = {"longformer": 2048, "bigbird": 2048}
"""The lengths at which peers run before their memory is measured; 256 for all others."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionBench(Config):
    """Every member and peer at every length, in turn in one process; medians over `repeats` rounds."""

    members: tuple[str, ...] = ("Window(256)",)  # patterns or mechanisms, "+ SCHEME" for one with positions
    against: tuple[str, ...] = ("sdpa", "local-attention", "flex")
    lengths: tuple[int, ...] = (4096, 8192, 16384, 32768)
    dense_up_to: int = 8192  # length; peers that look at every key stop here
    batch: int = 1
    heads: int = 8
    width: int = 64  # of a head
    causal: bool = False
    backward: bool = False
    memory: bool = True  # also the peak memory, a process for each line on a CPU
    device: str = "cpu"
    dtype: str = "float32"
    threads: int | None = None  # of a CPU; by default torch's own choice
    repeats: int = 7
    out: str = "runs/bench/attention"  # .csv and .png are added

    def __post_init__(self) -> None:
        for name in ("batch", "heads", "width", "repeats", "dense_up_to"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}: expected 1 or more, got {getattr(self, name)}")
        if self.threads is not None and self.threads < 1:
            raise InputError(f"threads: expected 1 or more, got {self.threads}")
        if not self.lengths or min(self.lengths) < 1:
            raise InputError(f"lengths: expected lengths of 1 or more, got {list(self.lengths)}")
        for text in self.members:
            for length in self.lengths:
                Member.read(text, length)
        for name in self.against:
            if name not in PEERS:
                raise unknown("peer", name, PEERS)
        if self.dtype not in ("float32", "float64", "bfloat16", "float16"):
            raise unknown("dtype", self.dtype, ["float32", "float64", "bfloat16", "float16"])
        _check_device(self.device)


@dataclasses.dataclass(frozen=True)
class Measured:
    """One line of the result."""

    name: str
    length: int
    median_ms: float
    fastest_ms: float
    peak_mib: float | None
    density: float | None = None  # of a pattern: the share of all pairs that it allows


def run(config: AttentionBench) -> list[Measured]:
    """Measure, print a table with slopes and ratios, write OUT.csv and OUT.png."""
    from rich.console import Console

    console = Console()
    begin(config.threads)
    console.print(
        f"{'causal ' if config.causal else ''}attention, "
        f"{'forward and backward' if config.backward else 'forward'}: {_setting(config)}"
    )
    tell = functools.partial(console.print, soft_wrap=True)
    lines = [line for length in config.lengths for line in _at(config, length, tell)]
    console.print(_table(lines))
    for text in (*_slopes(lines), *_ratios(config, lines)):
        tell(text, highlight=False)
    _save(config, lines, tell)
    return lines


def _at(config: AttentionBench, length: int, tell: Callable[[str], object]) -> list[Measured]:
    """All contenders at one length: memory before time, so that what does not fit ends its own process."""
    calls, peaks, shares = {}, {}, {}
    for case in _contests(config, length):
        warm = dataclasses.replace(case, length=min(length, WARM.get(case.peer, 256)))
        try:
            candidate = call(case)
            peaks[case.label] = peak_mib(call, case, warm, config.device) if config.memory else None
            candidate()
        except (AbsentError, RuntimeError, MemoryError) as error:  # a peer that fails is no failure of ours
            if case.peer is None:
                raise
            tell(f"{case.label} at {length}: left out, {_first_line(error)}")
            continue
        calls[case.label], shares[case.label] = candidate, _share(case)
    lines = []
    for name, seconds in in_turn(calls, config.repeats).items():
        line = Measured(name, length, median(seconds) * 1e3, min(seconds) * 1e3, peaks[name], shares[name])
        tell(f"{name} at {length}: {line.median_ms:.2f} ms")
        lines.append(line)
    return lines


def _contests(config: AttentionBench, length: int) -> Iterator[BenchmarkCase]:
    """Who runs at a length: each member and then its peers; a dense peer once."""
    shape = (
        config.batch,
        config.heads,
        config.width,
        config.backward,
        config.device,
        config.dtype,
        config.causal,
    )
    dense = [name for name in config.against if name in DENSE and length <= config.dense_up_to]
    for index, member in enumerate(config.members):
        peers = [name for name in config.against if name not in DENSE] + (dense if index == 0 else [])
        for peer in (None, *peers):
            yield BenchmarkCase(member, peer, length, *shape)


def _share(case: BenchmarkCase) -> float | None:
    pattern = case.member.pattern
    if case.peer is not None or pattern is None:
        return None
    return density(pattern, case.length, case.heads, case.causal)


def _check_device(name: str) -> None:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"device: expected 'cpu' or 'cuda', got {quote(name)}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(
            f"device: {quote(name)} was asked for and this machine has no CUDA device; use 'cpu'"
        )


def _setting(config: AttentionBench) -> str:
    on_cpu = torch.device(config.device).type == "cpu"
    place = f"cpu, {torch.get_num_threads()} threads" if on_cpu else torch.cuda.get_device_name(config.device)
    shape = f"batch {config.batch}, {config.heads} heads of {config.width}, {config.dtype}"
    return f"{shape}, {place}, torch {torch.__version__}"


def _table(lines: Iterable[Measured]) -> object:
    from rich.table import Table

    table = Table("attention", "length", "median ms", "fastest ms", "peak MiB", "pairs")
    for column in table.columns[1:]:
        column.justify = "right"
    for line in lines:
        peak = "" if line.peak_mib is None else f"{line.peak_mib:.0f}"
        share = "" if line.density is None else f"{line.density:.2%}"
        times = f"{line.median_ms:.2f}", f"{line.fastest_ms:.2f}"
        table.add_row(line.name, str(line.length), *times, peak, share)
    return table


def _slopes(lines: list[Measured]) -> Iterator[str]:
    """How time and memory grow: the slope of a line through their logarithms, 1 where they are linear."""
    for name in dict.fromkeys(line.name for line in lines):
        own = [line for line in lines if line.name == name]
        time = slope([(line.length, line.median_ms) for line in own])
        memory = slope([(line.length, line.peak_mib) for line in own if line.peak_mib])
        if time is not None:
            end = "" if memory is None else f", of peak memory {memory:.2f}"
            yield f"{name}: log-log slope of time {time:.2f}{end}"


def slope(points: list[tuple[int, float]]) -> float | None:
    """The least-squares slope of log y over log x; None for fewer than two different x."""
    if len({x for x, _ in points}) < 2:
        return None
    xs, ys = [math.log(x) for x, _ in points], [math.log(y) for _, y in points]
    x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - x_mean) ** 2 for x in xs)
    return sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys)) / spread


def _ratios(config: AttentionBench, lines: list[Measured]) -> Iterator[str]:
    """How much faster a member is than each peer, and what its scheme costs: medians of the same rounds."""
    results = {(line.name, line.length): line.median_ms for line in lines}
    for member in config.members:
        for peer in config.against:
            name = peer if peer in DENSE else f"{peer} {member}"
            pairs = [
                (n, results[name, n] / results[member, n]) for n in config.lengths if (name, n) in results
            ]
            if pairs:
                yield f"{member} against {peer}: " + ", ".join(f"{ratio:.2f}x at {n}" for n, ratio in pairs)
        alone = member.partition("+")[0].strip()
        if alone != member and alone in config.members:
            costs = ", ".join(f"{results[member, n] / results[alone, n]:.2f}x at {n}" for n in config.lengths)
            yield f"{member} costs, of {alone}: {costs}"


def _save(config: AttentionBench, lines: list[Measured], tell: Callable[[str], object]) -> None:
    text = io.StringIO()
    writer = csv.writer(text)
    shape = ("batch", "heads", "width", "causal", "backward", "device", "dtype")
    writer.writerow([field.name for field in dataclasses.fields(Measured)] + list(shape))
    for line in lines:
        writer.writerow([*dataclasses.astuple(line), *(getattr(config, name) for name in shape)])
    table, picture = Path(f"{config.out}.csv"), Path(f"{config.out}.png")
    atomic_write(table, text.getvalue().encode())
    tell(f"written to {table}")
    names = dict.fromkeys(line.name for line in lines)
    curves = {name: [(line.length, line.median_ms) for line in lines if line.name == name] for name in names}
    try:
        line_plot(picture, curves, "length", "milliseconds", log=True)
        tell(f"drawn in {picture}")
    except InputError as error:  # matplotlib is not there: the table is
        tell(str(error))


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0]
