"""Attention alone, 8 heads of 64, one text."""

import dataclasses
from collections.abc import Callable, Iterator

from polyformer.bench import contenders
from polyformer.bench.benchmark_case import BenchmarkCase
from polyformer.bench.member import density
from polyformer.bench.table.row import OURS, Asked, Case, Make, Row

FORWARD, BOTH = 2, 7
"""Products of queries or their gradients with keys or values in a forward pass, and with a backward pass,
which computes the scores again."""


def _cases(
    member: str,
    length: int,
    peers: tuple[str, ...],
    small: tuple[str, int],
    causal: bool = False,
    backward: bool = False,
) -> Callable[[bool], Iterator[Case]]:
    """`small`: the member and the length of a quick run."""

    def cases(quick: bool) -> Iterator[Case]:
        text, tokens = small if quick else (member, length)
        heads, width = (2, 8) if quick else (8, 64)
        ours = BenchmarkCase(text, None, tokens, 1, heads, width, backward, "cpu", "float32", causal)
        taking_part = [peer for peer in peers if not (quick and peer == "flex")]  # it compiles for a minute
        all_cases = {peer: dataclasses.replace(ours, peer=peer) for peer in taking_part} | {OURS: ours}
        yield Case({name: _make(case) for name, case in all_cases.items()}, flop=_flop(ours), tokens=tokens)

    return cases


def _make(case: BenchmarkCase) -> Make:
    return lambda: contenders.call(case)


def _flop(case: BenchmarkCase) -> float | None:
    """Of the pairs that a pattern allows, no others; None for a mechanism that has none."""
    pattern = case.member.pattern
    if pattern is None:
        return None
    pairs = density(pattern, case.length, case.heads, case.causal) * case.heads * case.length**2
    return pairs * 2 * case.width * (BOTH if case.backward else FORWARD)


TILED = "softmax(pattern=Full(), backend=tiled)"

ROWS = (
    Row(
        "performer",
        "Performer, not causal, n = 4096, forward",
        _cases("performer", 4096, ("performer-pytorch",), ("performer(features=8)", 64)),
        (Asked("performer-pytorch", 1.5),),
        repeats=9,
    ),
    Row(
        "lsh",
        "LSH, 4 rounds, causal, n = 8192, forward",
        _cases("lsh(rounds=4)", 8192, ("reformer-pytorch",), ("lsh(buckets=8, window=8)", 64), causal=True),
        (Asked("reformer-pytorch", 3.0),),
    ),
    Row(
        "window",
        "Window(256), n = 8192, forward",
        _cases("Window(256)", 8192, ("sdpa", "local-attention", "flex"), ("Window(8)", 64)),
        (Asked("sdpa", 8.0), Asked("local-attention", 3.0), Asked("flex", 1.0)),
        share=0.6,
        repeats=9,
    ),
    Row(
        "window-step",
        "Window(256), n = 8192, forward and backward",
        _cases("Window(256)", 8192, ("local-attention",), ("Window(8)", 64), backward=True),
        (Asked("local-attention"),),
        share=0.5,
    ),
    Row(
        "causal",
        "every earlier key, n = 8192, forward",
        _cases(TILED, 8192, ("sdpa",), (TILED, 64), causal=True),
        (Asked("sdpa"),),
        share=0.6,
    ),
    Row(
        "causal-step",
        "every earlier key, n = 8192, forward and backward",
        _cases(TILED, 8192, ("sdpa",), (TILED, 64), causal=True, backward=True),
        (Asked("sdpa"),),
        share=0.5,
        repeats=3,
    ),
)
