"""Measurement of a row in this process: contenders in turn, medians, ratios, shares of the product speed."""

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.core.measuring import median, time_interleaved, time_once
from polyformer.core.ops.tuning import instruction_set, recorded
from polyformer_lab.bench.records import Comparison, MeasuredCase, Record, Seconds
from polyformer_lab.bench.rows import OURS, SPEED, AbsentError, Case, Contest, Row

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
        absent[error.name or "a package"] = _reason(error)


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
            reason = _reason(error)
            absent[name if absent.get(name, reason) == reason else f"{name} ({case.name})"] = reason
    tokens = {name: result for name, result in results.items() if isinstance(result, Tensor)}
    for name, own in tokens.items():
        if name != OURS and OURS in tokens and own.shape == tokens[OURS].shape:
            facts[name]["same tokens"] = (own == tokens[OURS]).float().mean().item()
    return calls, facts


def _reason(error: Exception) -> str:
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
