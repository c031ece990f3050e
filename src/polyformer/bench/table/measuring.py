"""Measure a row in this process: contenders in turn, medians, ratios, shares of the product speed."""

import math
import os
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.bench.benchmark_case import AbsentError
from polyformer.bench.table.records import Comparison, MeasuredCase, Record, Seconds, today
from polyformer.bench.table.row import OURS, Case, Row
from polyformer.bench.timing import in_turn, median, stopwatch
from polyformer.ops.tuning.machine import instruction_set
from polyformer.ops.tuning.section import recorded

SHORTEST = 0.002
"""Seconds that a measured run takes at least: shorter calls are repeated in it."""

SPEED = "product speed"
"""The peer of a share."""

AGAIN = 3
"""Of a row with many cases those that look short are measured again, with so many times the rounds: among
hundreds of medians the least is an accident."""

Absent = dict[str, str]


def measure(row: Row, instructions: str, quick: bool) -> Record:
    """The record of a row; what ours raises goes to the caller, what a peer raises leaves the peer out."""
    absent: Absent = {}
    agreement: dict[str, str] = {}
    measured = []
    wide = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    asked = {(a.ours, a.peer): a.ratio if wide or a.narrow is None else a.narrow for a in row.asked}
    for case in _cases(row, quick, absent):
        calls, results = _prepared(case, absent)
        agreement |= _agreement(results)
        del results
        repeats = 1 if quick else row.repeats
        times = _measured(case, calls, repeats)
        if case.name and any(_short(times, *pair, ratio) for pair, ratio in asked.items()):
            times = _measured(case, calls, repeats * AGAIN)
        measured.append(times)
    comparisons = [
        worst for (ours, peer), ratio in asked.items() for worst in _worst(measured, ours, peer, ratio)
    ]
    share = row.share if wide or row.narrow_share is None else row.narrow_share
    return Record(
        row=row.name,
        instructions=instructions,
        date=today(),
        vectors=instruction_set(),
        threads=torch.get_num_threads(),
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0,
        cases=tuple(measured),
        comparisons=(*comparisons, *_shares(measured, share)),
        absent=absent,
        agreement=agreement,
        tuning=recorded(),
    )


def _cases(row: Row, quick: bool, absent: Absent) -> Iterator[Case]:
    """The row's cases; none where already their making needs a package that is not installed."""
    try:
        yield from row.cases(quick)
    except ModuleNotFoundError as error:
        absent[error.name or "a package"] = _reason(error)


def _prepared(case: Case, absent: Absent) -> tuple[dict[str, Callable[[], object]], dict[str, object]]:
    """The calls of all that take part, each run once, and what they returned."""
    calls, results = {}, {}
    for name, make in case.contenders.items():
        try:
            call = make()
            results[name], calls[name] = call(), call
        except Exception as error:  # a peer that fails is no failure of ours
            if name == OURS:
                raise
            absent[name] = _reason(error)
    return calls, results


def _reason(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"not installed ({error.name})"
    text = " ".join(str(error).split())[:200] or type(error).__name__
    return text if isinstance(error, AbsentError) else f"{type(error).__name__}: {text}"


def _agreement(results: Mapping[str, object]) -> dict[str, str]:
    """Of calls that return tokens: whether they are ours."""
    ours = results.get(OURS)
    if not isinstance(ours, Tensor) or ours.is_floating_point():
        return {}
    counts = {}
    for name, tokens in results.items():
        if name != OURS and isinstance(tokens, Tensor) and tokens.shape == ours.shape:
            same = (tokens == ours).sum().item()
            counts[name] = (
                "the same tokens" if same == ours.numel() else f"{same} of {ours.numel()} tokens the same"
            )
    return counts


def _measured(case: Case, calls: Mapping[str, Callable[[], object]], repeats: int) -> MeasuredCase:
    products = {} if case.flop is None else products_at_their_best()
    loops = {name: math.ceil(SHORTEST / max(stopwatch(call), 1e-7)) for name, call in calls.items()}
    runs = {name: _repeated(call, loops[name]) for name, call in calls.items()}
    for product in products.values():
        product()
    rounds = in_turn({**runs, **products}, repeats, warmup=0)  # everything has run before
    return MeasuredCase(
        name=case.name,
        seconds={name: _seconds(rounds[name], loops[name]) for name in calls},
        flop=case.flop,
        tokens=case.tokens,
        peak=max(PRODUCT_FLOP / median(rounds[name]) for name in products) if products else None,
    )


def _repeated(call: Callable[[], object], loops: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(loops):
            call()

    return run


def _seconds(runs: list[float], loops: int) -> Seconds:
    each = [run / loops for run in runs]
    return Seconds(median=median(each), fastest=min(each), slowest=max(each), rounds=len(each))


PRODUCT = 1024, 2048, 2048
"""Rows, inputs and outputs of the product whose speed stands for the machine's."""

PRODUCT_FLOP = 2.0 * math.prod(PRODUCT)


def products_at_their_best() -> dict[str, Callable[[], object]]:
    """The same large float32 product by each library that torch has for it on a CPU."""
    rows, inputs, outputs = PRODUCT
    x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
    libraries: dict[str, Callable[[], object]] = {"product by BLAS": lambda: F.linear(x, weight)}
    if torch.backends.mkldnn.is_available():
        onednn = torch.ops.mkldnn._linear_pointwise
        libraries["product by oneDNN"] = lambda: onednn(x, weight, None, "none", [], "")
    return libraries


def _ratio(case: MeasuredCase, ours: str, peer: str) -> float | None:
    if ours not in case.seconds or peer not in case.seconds:
        return None
    return case.seconds[peer].median / case.seconds[ours].median


def _short(case: MeasuredCase, ours: str, peer: str, asked: float | None) -> bool:
    ratio = _ratio(case, ours, peer)
    return ratio is not None and asked is not None and ratio < asked


def _worst(cases: list[MeasuredCase], ours: str, peer: str, asked: float | None) -> list[Comparison]:
    ratios = [(ratio, case.name) for case in cases if (ratio := _ratio(case, ours, peer)) is not None]
    if not ratios:
        return []
    ratio, case = min(ratios)
    return [Comparison(ours=ours, peer=peer, ratio=ratio, asked=asked, case=case)]


def _shares(cases: list[MeasuredCase], asked: float | None) -> list[Comparison]:
    shares = [(share, case.name) for case in cases if (share := case.share(OURS)) is not None]
    if not shares:
        return []
    share, case = min(shares)
    return [Comparison(ours=OURS, peer=SPEED, ratio=share, asked=asked, case=case)]
