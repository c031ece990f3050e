"""Exchange of keys between processes: each receives the keys of its queries, and returns their gradients.

The layout of the pattern lists the keys that the queries of each process need, and is known to every process.
`count_transfer` reports the bytes that are exchanged. On the `meta` device, which only traces shapes, nothing
is sent, and no process group is needed.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from polyformer.attention.patterns.base import Pattern
from polyformer.attention.patterns.implied import implied
from polyformer.attention.patterns.layout import Interval, clip, count, intersect, unite
from polyformer.core.instrumentation import Recorder
from polyformer.core.ops.autograd import WHOLE, first_order
from polyformer.core.sequence.context import Context, Run, SequenceShard, balanced, contiguous

UNEVEN = 1.25
"""Largest ratio of the work of the busiest process to the average at which each process has a single run."""

PROBES = 8
"""Number of runs of queries per process in the estimate of its work."""

FEW = 4
"""Largest number of runs of keys with separate calls; more runs are merged, with zeros in the gaps."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A run of queries and the runs of keys that they may see, in slots of the whole sequence."""

    queries: Run
    keys: tuple[Interval, ...]

    def spans(self) -> tuple[Interval, ...]:
        """Return the runs of keys for separate calls: `keys`, or a single run from first to last if many."""
        return self.keys if len(self.keys) <= FEW else ((self.keys[0][0], self.keys[-1][1]),)


@dataclasses.dataclass(frozen=True)
class Needs:
    """The keys that the processes of a shard need from each other for a call.

    parts: the runs of queries of each process. keys: all keys that the queries of each process may see.
    """

    shard: SequenceShard = dataclasses.field(repr=False)
    parts: tuple[tuple[Part, ...], ...]
    keys: tuple[tuple[Interval, ...], ...]

    def sent(self, sender: int, receiver: int) -> tuple[Interval, ...]:
        """Return the slots of the keys that `sender` sends to `receiver`, in ascending order."""
        if sender == receiver:
            return ()
        # The keys that the receiver needs and the sender has.
        return intersect(self.keys[receiver], unite(self.shard.key_runs[sender]))

    def part_needed(self) -> float:
        """Return the fraction of the keys of other processes that the queries of the processes need."""
        processes = len(self.keys)
        every = (processes - 1) * sum(stop - start for runs in self.shard.key_runs for start, stop in runs)
        return sum(map(self.received, range(processes))) / max(every, 1)

    def received(self, rank: int) -> int:
        """Return the number of keys that a process receives from all others."""
        return sum(count(self.sent(sender, rank)) for sender in range(len(self.keys)))


def choose_runs(
    patterns: Iterable[Pattern | None], whole: Context, processes: int
) -> tuple[tuple[Run, ...], ...]:
    """Return the runs of slots of every process, for layers with these patterns.

    Each process has a single run if this balances the work of all layers, for example with windows: then only
    the edges of a run need keys of other processes. Otherwise each process has an early run and a late run,
    which together balance the work.
    """
    limits, busiest = implied(whole), 1.0
    for pattern in patterns:
        both = limits if pattern is None or limits is None else pattern & limits
        busiest = max(busiest, imbalance(both or pattern, whole, processes))
    return (balanced if busiest > UNEVEN else contiguous)(whole.q_len, processes)


def imbalance(pattern: Pattern | None, whole: Context, processes: int) -> float:
    """Return the work of the busiest process divided by the average if each process has a single run."""
    work = []
    for part in contiguous(whole.q_len, processes):
        # A few rows are enough to estimate the work.
        step = -(-(part[0][1] - part[0][0]) // PROBES) or 1
        edges = sorted({*range(*part[0], step), *_cuts(pattern, whole, part[0]), part[0][1]})
        keys = [_keys(pattern, whole, a, b) for a, b in itertools.pairwise(edges)]
        # Queries times keys, summed over the rows.
        work.append(sum((b - a) * count(own) for (a, b), own in zip(itertools.pairwise(edges), keys)))
    return max(work) * processes / max(sum(work), 1)


def _cuts(pattern: Pattern | None, whole: Context, run: Run) -> list[int]:
    """Return the cuts of the pattern inside a run."""
    return [] if pattern is None else [edge for edge in pattern.cuts(whole) if run[0] < edge < run[1]]


def _keys(pattern: Pattern | None, whole: Context, start: int, stop: int) -> tuple[Interval, ...]:
    """Return the keys that these queries may see."""
    return clip(0, whole.kv_len, whole.kv_len) if pattern is None else pattern.keys(whole, start, stop).some


def find_needs(pattern: Pattern | None, whole: Context, shard: SequenceShard, every: bool = False) -> Needs:
    """Return the needs of a call of `pattern`, which includes the limits of the context.

    every: all processes need all keys.
    """
    pattern = None if every else pattern

    def keys_of(start: int, stop: int) -> tuple[Interval, ...]:
        edges = sorted({start, stop, *_cuts(pattern, whole, (start, stop))})
        return unite(run for a, b in itertools.pairwise(edges) for run in _keys(pattern, whole, a, b))

    parts = tuple(
        tuple(Part((start, stop), keys_of(start, stop)) for start, stop in runs if start < stop)
        for runs in shard.runs
    )
    return Needs(shard, parts, tuple(unite(run for part in of for run in part.keys) for of in parts))


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A single exchange of this process: its purpose and the bytes sent and received."""

    what: str
    sent: int
    received: int


_recorder: Recorder[Transfer] = Recorder("transfers")


def counted_transfers() -> AbstractContextManager[list[Transfer]]:
    """Collect the exchanges in the context, in order, including a backward pass that runs in it."""
    return _recorder.collect()


def count_transfer(what: str, sent: int, received: int) -> None:
    """Pass an exchange to all active collectors."""
    _recorder.record(Transfer(what, sent, received))


class _ToPeers(torch.autograd.Function):
    """An all-to-all of rows [N, ...], grouped by process, with a backward pass."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, group: Any, what: str, sent: list[int], received: list[int]
    ) -> Tensor:
        """Return the rows that the other processes send to this process."""
        ctx.group, ctx.what, ctx.sent, ctx.received = group, what, sent, received
        return _sent(rows, group, what, sent, received)

    @staticmethod
    @first_order("a sequence that is spread over processes", WHOLE)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Send the gradients back to the processes that sent the rows."""
        rows = _sent(grad, ctx.group, f"gradients of {ctx.what}", ctx.received, ctx.sent)
        return rows, None, None, None, None


def _sent(rows: Tensor, group: Any, what: str, sent: list[int], received: list[int]) -> Tensor:
    if len(sent) == 1:
        return rows.clone()
    # The received rows are grouped by sender.
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    if not rows.is_meta:
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    count_transfer(what, rows.nbytes, arrived.nbytes)
    return arrived


class _Gathered(torch.autograd.Function):
    """An all-gather of a tensor with the same shape in all processes, with a backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: SequenceShard, what: str) -> Tensor:
        """Return the tensors of all processes, [P, ...]."""
        ctx.group, ctx.what = shard.group, what
        x = x.contiguous()
        everybody = [torch.empty_like(x) for _ in shard.runs]
        if not x.is_meta:
            dist.all_gather(everybody, x, group=shard.group)
        count_transfer(what, x.nbytes * (len(everybody) - 1), x.nbytes * (len(everybody) - 1))
        return torch.stack(everybody)

    @staticmethod
    @first_order("a sequence that is spread over processes", WHOLE)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the tensor of this process, summed over all processes that received it."""
        # `all_reduce` overwrites its argument, and the gradient belongs to autograd.
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        others = len(grad) - 1
        count_transfer(f"gradients of {ctx.what}", *[2 * others * grad[0].nbytes] * 2)
        return grad[dist.get_rank(ctx.group)], None, None


def total(x: Tensor, shard: SequenceShard) -> Tensor:
    """Return the sum of x over the processes of a shard, without a gradient."""
    x = x.clone()
    if len(shard.runs) > 1 and not x.is_meta:
        dist.all_reduce(x, group=shard.group)
    return x


def total_of_parts(x: Tensor, shard: SequenceShard) -> Tensor:
    """Return the sum of x over the processes of a shard.

    The gradient of the part of this process is multiplied by the number of processes, so that the mean of the
    gradients of all processes is the gradient of the sum.
    """
    part = x * len(shard.runs)
    # The value is the total, but the gradient flows only through `part`.
    return part + (total(x.detach(), shard) - part).detach()


def everywhere(x: Tensor, shard: SequenceShard, what: str) -> Tensor:
    """Return x [B, T, ...] of all slots, gathered from the tokens of each process; without a gradient."""
    lengths = [sum(stop - start for start, stop in runs) for runs in shard.runs]
    # An all-gather requires equal shapes: pad to the longest run and cut afterwards.
    room = x.new_zeros(x.shape[0], max(lengths), *x.shape[2:])
    room[:, : x.shape[1]] = x.detach()
    gathered = gather(room, shard, what)
    tokens = torch.cat([theirs[:, :length] for theirs, length in zip(gathered, lengths)], 1)
    return tokens[:, torch.cat([_slots(runs, x.device) for runs in shard.runs]).argsort()]


def gather(x: Tensor, shard: SequenceShard, what: str) -> Tensor:
    """Return x of every process of a shard, [P, ...]; x must have the same shape in all of them."""
    return _Gathered.apply(x, shard, what) if len(shard.runs) > 1 else x.unsqueeze(0)


class _Anchored(torch.autograd.Function):
    """The identity of `out` with `other` in its graph.

    All processes must take part in the backward pass of an exchange, even if their queries used none of its
    keys.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, other: Tensor) -> Tensor:
        """Return `out` unchanged."""
        ctx.shape, ctx.dtype, ctx.device = other.shape, other.dtype, other.device
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient of `out`, and zeros for `other`."""
        return grad, torch.zeros((), dtype=ctx.dtype, device=ctx.device).expand(ctx.shape)


def anchored(out: Tensor, other: Tensor) -> Tensor:
    """Return `out` with an edge of the graph to `other`, which receives zeros as gradients."""
    return _Anchored.apply(out, other) if torch.is_grad_enabled() and other.requires_grad else out


def exchange(k: Tensor, v: Tensor, needs: Needs, what: str = "keys and values") -> Tensor:
    """Return the concatenated k and v that this process needs, [B, Hkv, N, D + Dv], in ascending slot order.

    k [B, Hkv, T, D], v [B, Hkv, T, Dv]: the keys and values of the process, in ascending slot order.
    """
    shard, rank = needs.shard, needs.shard.rank
    processes, held = range(len(shard.runs)), shard.key_shard.slots(k.device)
    sent = [_slots(needs.sent(rank, peer), k.device) for peer in processes]
    received = [_slots(needs.sent(peer, rank), k.device) for peer in processes]
    own = _slots(intersect(needs.keys[rank], unite(shard.key_shard.local_runs)), k.device)
    # [B, Hkv, T, D + Dv] -> [T, B, Hkv, D + Dv]: an all-to-all splits the first axis.
    rows = torch.cat([k, v], -1).movedim(2, 0)
    arrived = _ToPeers.apply(
        rows.index_select(0, torch.searchsorted(held, torch.cat(sent))),
        shard.group,
        what,
        list(map(len, sent)),
        list(map(len, received)),
    )
    rows = torch.cat([rows.index_select(0, torch.searchsorted(held, own)), arrived])
    # The rows are ordered by process: restore the order of the slots.
    return rows.index_select(0, torch.cat([own, *received]).argsort()).movedim(0, 2)


def _slots(runs: Sequence[Interval], device: torch.device) -> Tensor:
    """Return the slots of these runs, in order."""
    none = torch.zeros(0, dtype=torch.long, device=device)
    return torch.cat([none, *(torch.arange(start, stop, device=device) for start, stop in runs)])
