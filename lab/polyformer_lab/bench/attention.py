"""Time and peak memory of attention only, by length: our members next to torch and public peers.

`polyformer_lab.bench.member` describes how to write a member.

The contenders are our members, torch's dense attention, and installed public peers.
"""

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from polyformer.attention.patterns import Causal
from polyformer.core.errors import InputError
from polyformer.core.ops.compiled_code import prepare_inductor
from polyformer.core.sequence.context import Context
from polyformer_lab.bench import peers
from polyformer_lab.bench.member import Alone, Attention, BenchmarkCase, Member, density
from polyformer_lab.bench.rows import OURS, AbsentError, Case, Contest, DeviceBench, Row, Table, check_names
from polyformer_lab.bench.running import run_rows
from polyformer_lab.comparison import line_plot
from polyformer_lab.costs import peak_mib

DENSE = "sdpa", "unfused"
"""Peers that compute attention over every key for any member."""


def call(case: BenchmarkCase) -> Callable[[], object]:
    """Return the call to measure, after its inputs and all preparations are made.

    The inputs have the memory layout of a model's projections, [B, T, H, D].

    Raises `AbsentError` if the contender cannot take part.
    """
    generator = torch.Generator(case.device).manual_seed(0)
    shape = case.batch, case.length, case.heads, case.width
    q, k, v, grad = (torch.randn(shape, **case.place, generator=generator).transpose(1, 2) for _ in range(4))
    inputs = [x.requires_grad_(case.backward) for x in (q, k, v)]
    attention = _ours(case) if case.peer is None else PEERS[case.peer](case)

    def forward() -> None:
        with torch.no_grad():
            attention(*inputs)

    def both() -> None:
        for x in inputs:
            x.grad = None
        attention(*inputs).backward(grad)

    return both if case.backward else forward


def _ours(case: BenchmarkCase) -> Attention:
    return case.placed(Alone(case.member, case.length, case.heads, case.width, case.causal))


def _sdpa(case: BenchmarkCase) -> Attention:
    """Return torch's fused kernel over every key."""
    return functools.partial(F.scaled_dot_product_attention, is_causal=case.causal)


def _unfused(case: BenchmarkCase) -> Attention:
    """Return attention over every key by its equation, without fusion."""
    scale, shape = case.width**-0.5, (case.length, case.length)
    if not case.causal:
        return lambda q, k, v: torch.softmax(q @ k.mT * scale, -1) @ v
    future = torch.ones(shape, dtype=torch.bool, device=case.device).triu(1)
    return lambda q, k, v: torch.softmax((q @ k.mT * scale).masked_fill(future, -math.inf), -1) @ v


def _flex(case: BenchmarkCase) -> Attention:
    """Return FlexAttention as in its documentation: compiled, with a BlockMask from the mask itself."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    device, pattern = torch.device(case.device), case.member.pattern
    if pattern is None or case.member.position is not None:
        raise case.no_counterpart()
    if case.backward and device.type == "cpu":
        raise AbsentError("FlexAttention has no backward on a CPU")
    context = Context(case.length, case.length)
    seen = (pattern & Causal() if case.causal else pattern).mask_mod(context)
    prepare_inductor()
    # Compiled, since otherwise the mask of a long input would not fit into memory.
    make: Any = torch.compile(create_block_mask)
    mask = make(seen, None, None, case.length, case.length, device=case.device)
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask)


PEERS: dict[str, Callable[[BenchmarkCase], Attention]] = {
    "sdpa": _sdpa,
    "unfused": _unfused,
    "local-attention": peers.local_attention,
    "longformer": peers.longformer,
    "bigbird": peers.bigbird,
    "x-transformers": peers.x_transformers,
    "linformer": peers.linformer,
    "performer-pytorch": peers.performer_pytorch,
    "reformer-pytorch": peers.reformer_pytorch,
    "routing-transformer": peers.routing_transformer,
    "flex": _flex,
    "fla": peers.flash_linear_attention,
}


WARM: dict[str | None, int] = {"longformer": 2048, "bigbird": 2048}
"""The lengths at which peers run before their memory is measured; all others run at 256."""

LENGTH = "n = "

FORWARD, BOTH = 2, 7
"""The number of products of queries or their gradients with keys or values in a forward pass, and with a
backward pass, which computes the scores again.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionBench(DeviceBench):
    """Every member and peer at every length, in turn in one process; medians over `repeats` rounds."""

    members: tuple[str, ...] = ("Window(256)",)  # patterns or mechanisms, "+ SCHEME" for one with positions
    against: tuple[str, ...] = ("sdpa", "local-attention", "flex")
    lengths: tuple[int, ...] = (4096, 8192, 16384, 32768)
    dense_up_to: int = 8192  # the longest length of peers that attend to every key
    batch: int = 1
    heads: int = 8
    width: int = 64  # of a head
    causal: bool = False
    backward: bool = False
    memory: bool = True  # also the peak memory, a process for each line on a CPU
    repeats: int = 7
    plot: str | None = "runs/bench/attention.png"  # times by length

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.lengths or not self.members:
            raise InputError("members, lengths: expected one or more of each, got none")
        for text in self.members:
            for length in self.lengths:
                Member.read(text, length)
        check_names("peer", self.against, PEERS)

    def rows(self) -> Iterator[Row]:
        """Yield all lengths in one row, since their contenders are the same."""
        passes = "forward and backward" if self.backward else "forward"
        what = f"{'causal ' if self.causal else ''}attention, {passes}, {self.heads} heads of {self.width}"
        if len(self.members) == 1:
            what = f"{self.members[0]}, {what}"
        cases = functools.partial(map, self._case, self.lengths)
        yield Row("attention", what, cases, self._pairs(), repeats=self.repeats)

    def _case(self, length: int) -> Case:
        names = "batch", "heads", "width", "backward", "device", "dtype", "causal"
        shape = {name: getattr(self, name) for name in names}
        cases = {
            self._label(member, peer): BenchmarkCase(member, peer, length, **shape)
            for index, member in enumerate(self.members)
            for peer in (None, *self.against)
            if peer not in DENSE or (index == 0 and length <= self.dense_up_to)
        }
        ours = {label: case for label, case in cases.items() if case.peer is None}
        pairs = {
            label: density(case.member.pattern, length, self.heads, self.causal)
            for label, case in ours.items()
            if case.member.pattern is not None
        }
        # Products of the pairs that the pattern allows; a mechanism without a pattern has no such count.
        flop = 2 * self.width * self.batch * self.heads * length**2 * (BOTH if self.backward else FORWARD)

        def facts(label: str) -> dict[str, float]:
            known = {"pairs": pairs[label]} if label in pairs else {}
            if self.memory:
                case = cases[label]
                warm = dataclasses.replace(case, length=min(length, WARM.get(case.peer, 256)))
                known["peak MiB"] = peak_mib(call, case, warm, self.device)
            return known

        return Case(
            contenders={label: functools.partial(call, case) for label, case in cases.items()},
            name=f"{LENGTH}{length}",
            ours=tuple(ours),
            work={"tokens": self.batch * length},
            flop=self.flop(**{label: share * flop for label, share in pairs.items()}),
            facts={label: functools.partial(facts, label) for label in cases},
        )

    def _pairs(self) -> list[Contest]:
        """Return each member with its peers, and each member without its scheme and with it."""
        label, members = self._label, self.members
        peers = [(label(each, None), label(each, peer)) for each in members for peer in self.against]
        alone = {member: member.partition("+")[0].strip() for member in members}
        return peers + [(base, member) for member, base in alone.items() if base in alone and base != member]

    def _label(self, member: str, peer: str | None) -> str:
        """Return the label of a contender in tables and plots; the row names the only member."""
        if peer in DENSE or len(self.members) == 1:
            return peer or OURS
        return member if peer is None else f"{peer} {member}"


def run(config: AttentionBench) -> Table:
    """Measure, print the table and the slopes, and draw the plot."""
    table = run_rows(config)
    lines = [
        (name, int(case.name.removeprefix(LENGTH)), seconds, case.facts[name], record.instructions)
        for record in table.records
        for case in record.cases
        for name, seconds in case.seconds.items()
    ]
    several = len({line[-1] for line in lines}) > 1
    curves: dict[str, list[tuple[int, float]]] = {}
    peaks: dict[str, list[tuple[int, float]]] = {}
    for name, length, seconds, facts, instructions in lines:
        label = f"{name}, {instructions}" if several else name
        curves.setdefault(label, []).append((length, seconds.median * 1e3))
        peaks.setdefault(label, []).extend([(length, facts["peak MiB"])] if facts.get("peak MiB") else [])
    for name, points in curves.items():
        slopes = {"time": slope(points), "peak memory": slope(peaks[name])}
        shown = [f"of {what} {each:.2f}" for what, each in slopes.items() if each is not None]
        if shown:
            print(f"{name}: log-log slope {', '.join(shown)}")
    if config.plot is not None:
        try:
            line_plot(config.plot, curves, "length", "milliseconds", log=True)
            print(f"drawn in {config.plot}")
        except InputError as error:  # the table is printed even without matplotlib
            print(error)
    return table


def slope(points: list[tuple[int, float]]) -> float | None:
    """Return the least-squares slope of log y over log x; None for fewer than two different x."""
    if len({x for x, _ in points}) < 2:
        return None
    return statistics.linear_regression(*zip(*((math.log(x), math.log(y)) for x, y in points))).slope
