"""Context-parallel `attend`: keys are sent to the queries, and the parts are joined by log-sum-exp.

There are three methods; the first is the reference:

    all      every process receives all keys: an all-gather
    needed   every process receives the keys that the layout lists for its queries: an all-to-all
    ring     the keys of every process pass from process to process, overlapped with computation

If a layout lists few keys, `needed` sends the least. If it lists most keys, `ring` sends little more, waits
less, and has the keys of only three processes in memory instead of all; in return it recomputes the parts in
the backward pass.

A process makes a call for each run of its queries and each run of keys that they need.

In the ring (Liu et al. 2023, Ring Attention, section 3; here with any pattern, and the backends of any call)
sending overlaps with computation. In the backward pass the keys pass around the ring again, followed by their
gradients, and the parts are recomputed:

    out = sum_i w_i out_i      w_i = e^(lse_i - lse)      lse = log sum_i e^lse_i      over the parts i
    grad out_i = w_i grad out
    grad lse_i = w_i (grad out . (out_i - out) + grad lse)
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from polyformer.attention.functional.key_exchange import (
    Needs,
    Part,
    anchored,
    count_transfer,
    exchange,
    find_needs,
)
from polyformer.attention.functional.relative import TABLES, Relative
from polyformer.attention.functional.request import Request
from polyformer.attention.functional.splits import join_by_lse
from polyformer.attention.patterns.base import ScoreMod
from polyformer.attention.patterns.call_parts import pattern_in_part
from polyformer.attention.patterns.layout import Interval, intersect
from polyformer.attention.patterns.mods import broadcasts
from polyformer.core.errors import InputError
from polyformer.core.ops.autograd import WHOLE, autocast_disabled, first_order
from polyformer.core.sequence.context import SequenceShard
from polyformer.core.sequence.context_parallel import slice_context

Compute = Callable[[Request], tuple[Tensor, Tensor]]
"""Function that computes a part: output [B, H, T, Dv] and log-sum-exp [B, H, T]."""


def part_request(request: Request, first: int, part: Part, span: Interval, k: Tensor, v: Tensor) -> Request:
    """Return the call of the queries of a part over the keys k, v of the slots `span`.

    first: the index of the first query of the part among the queries of the process.
    """
    whole, count, (key, _) = request.context.whole, part.queries[1] - part.queries[0], span
    assert whole is not None
    pattern, relative = request.pattern, request.relative
    if relative is not None and relative.content is not None:
        relative = dataclasses.replace(relative, content=relative.content[:, :, first : first + count])
    return dataclasses.replace(
        request,
        q=request.q[:, :, first : first + count],
        k=k,
        v=v,
        context=slice_context(whole, part.queries, span, k.device),
        pattern=None if pattern is None else pattern_in_part(pattern, whole, part.queries[0], key),
        relative=relative,
        score_mod=None if request.score_mod is None else _moved(request.score_mod, first, key),
    )


def _moved(score_mod: ScoreMod, query: int, key: int) -> ScoreMod:
    """Return `score_mod` for a part with query 0 at index `query` of the process and key 0 at slot `key`."""

    @broadcasts
    def moved(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score_mod(score, b, h, q_idx + query, kv_idx + key)

    return moved


def numbered(parts: Iterable[Part]) -> Iterable[tuple[int, Part]]:
    """Yield each part of a process with the index of its first query among the queries of the process."""
    first = 0
    for part in parts:
        yield first, part
        first += part.queries[1] - part.queries[0]


def keys_at(kv: Tensor, held: tuple[Interval, ...], span: Interval) -> Tensor:
    """Return the slots `span` of kv [B, Hkv, N, W], which has the slots `held`; zeros for missing slots."""
    # The index in kv at which each run of slots in `held` begins.
    starts, first = [], 0
    for start, stop in held:
        starts.append(first)
        first += stop - start
    pieces = [
        (max(start, span[0]), min(stop, span[1]), at + max(start, span[0]) - start)
        for (start, stop), at in zip(held, starts)
        if intersect(((start, stop),), (span,))
    ]
    # A single piece without gaps is a view: no copy.
    if [(start, stop) for start, stop, _ in pieces] == [span]:
        return kv.narrow(2, pieces[0][2], span[1] - span[0])
    there = torch.cat([torch.arange(a - span[0], b - span[0], device=kv.device) for a, b, _ in pieces])
    rows = torch.cat([kv.narrow(2, at, stop - start) for start, stop, at in pieces], 2)
    return rows.new_zeros(*kv.shape[:2], span[1] - span[0], kv.shape[3]).index_copy(2, there, rows)


def nothing_seen(request: Request, count: int, wide: bool = False) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of queries that may see no key.

    wide: both have float32 or more, for sums.
    """
    q, precise = request.q, torch.promote_types(request.q.dtype, torch.float32)
    out = q.new_zeros(*q.shape[:2], count, request.v.shape[3], dtype=precise if wide else q.dtype)
    return out, torch.full(out.shape[:3], -torch.inf, dtype=precise, device=q.device)


def refuses_ring(request: Request) -> str | None:
    """Return why a call cannot be computed in parts that are recomputed, or None."""
    if request.score_mod is not None:
        return "a ring does not return gradients of tensors that a score_mod captures"
    if request.dropout:
        return "a ring recomputes its parts, and dropout would draw other numbers"
    return None


def run_ring(request: Request, needs: Needs, compute: Compute) -> tuple[Tensor, Tensor]:
    """Return output [B, H, T, Dv] and log-sum-exp [B, H, T] of the queries of this process."""
    kv = torch.cat([request.k, request.v], -1)
    return _Ring.apply(request, needs, compute, request.q, kv, *_tensors(request.relative))


class _Ring(torch.autograd.Function):
    """The ring as a function of q [B, H, T, D], concatenated k and v, and the tensors of relative terms."""

    @staticmethod
    @autocast_disabled
    def forward(
        ctx: Any, request: Request, needs: Needs, compute: Compute, q: Tensor, kv: Tensor, *terms: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp, joined over the keys of all processes as they arrive."""
        request = _with(request, q, terms)
        own = needs.parts[needs.shard.rank]
        # Online softmax over the parts: start with no keys and a log-sum-exp of -inf.
        joined = [nothing_seen(request, part.queries[1] - part.queries[0], wide=True) for part in own]
        chunk = kv
        for owner in _turns(needs.shard):
            # Start the transfer before the computation, so that both overlap.
            hop = _start(chunk, needs.shard, owner, "keys and values")
            for number, call in _calls(request, needs, owner, chunk):
                outs, lses = zip(joined[number], compute(call))
                joined[number] = join_by_lse(list(outs), list(lses))
            chunk = hop.arrived()
        outs, lses = zip(*joined, nothing_seen(request, 0, wide=True))
        out, lse = torch.cat(outs, 2).to(q.dtype), torch.cat(lses, 2)
        ctx.call = request, needs, compute
        ctx.save_for_backward(q, kv, out, lse, *terms)
        return out, lse

    @staticmethod
    @first_order("a sequence that is spread over processes", WHOLE)
    @autocast_disabled
    def backward(ctx: Any, grad: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        """Pass the keys around again; the gradients of the keys of a process follow a step later."""
        q, kv, out, lse, *terms = ctx.saved_tensors
        request, needs, compute = ctx.call
        shard, chunk, behind = needs.shard, kv, None
        leaves = [x.detach().requires_grad_() for x in (q, *terms)]
        totals = [torch.zeros_like(x, dtype=lse.dtype) for x in leaves]  # sums over all processes: float32
        for owner in _turns(shard):
            hop = _start(chunk, shard, owner, "keys and values")
            keys = chunk.detach().requires_grad_()
            with torch.enable_grad():
                parts = [
                    (number, *compute(call))
                    for number, call in _calls(_with(request, leaves[0], leaves[1:]), needs, owner, keys)
                ]
            own, *others = _gradients(parts, [keys, *leaves], needs, (grad, grad_lse, out, lse))
            # Gradients of the queries and of the tables stay here; gradients of the keys travel.
            totals = [total + other for total, other in zip(totals, others)]
            if behind is not None:
                # Add to the gradient of these keys that the processes before have computed.
                own = own + behind.arrived()
            behind = _start(own, shard, owner, "gradients of keys and values", home=True)
            chunk = hop.arrived()
        assert behind is not None
        totals = [total.to(leaf.dtype) for total, leaf in zip(totals, leaves)]
        return None, None, None, totals[0], behind.arrived(), *totals[1:]


def _gradients(
    parts: list[tuple[int, Tensor, Tensor]],
    leaves: list[Tensor],
    needs: Needs,
    whole: tuple[Tensor, Tensor, Tensor, Tensor],
) -> list[Tensor]:
    """Return the gradients of `leaves`, from the parts (number of the run of queries, out, lse) of a process.

    whole: grad out, grad lse, out and lse of all queries of this process.
    """
    starts = [first for first, _ in numbered(needs.parts[needs.shard.rank])]
    outputs, gradients = [], []
    for number, out_i, lse_i in parts:
        if not out_i.requires_grad:
            continue
        here = slice(starts[number], starts[number] + out_i.shape[2])
        grad, grad_lse, out, lse = (x[:, :, here] for x in whole)
        # A query without keys has lse = -inf: 0 instead avoids -inf - (-inf) = NaN.
        # At most 1: of large scores, the two are rounded apart.
        weight = (lse_i.detach() - lse.masked_fill(lse == -torch.inf, 0.0)).exp().clamp_max(1)
        apart = (grad * (out_i.detach() - out)).sum(-1, dtype=weight.dtype)
        outputs += [out_i, lse_i]
        gradients += [(grad * weight.unsqueeze(-1)).to(out_i.dtype), weight * (apart + grad_lse)]
    if not outputs:
        return [torch.zeros_like(leaf) for leaf in leaves]
    return list(torch.autograd.grad(outputs, leaves, gradients, materialize_grads=True, allow_unused=True))


def _turns(shard: SequenceShard) -> Iterator[int]:
    """Yield the owner of the present keys for each step: this process, then the processes before it."""
    return ((shard.rank - step) % len(shard.runs) for step in range(len(shard.runs)))


def _calls(request: Request, needs: Needs, owner: int, kv: Tensor) -> Iterator[tuple[int, Request]]:
    """Yield the calls of the runs of queries of this process, by number, over the keys kv of `owner`."""
    width = request.q.shape[3]
    for number, (first, part) in enumerate(numbered(needs.parts[needs.shard.rank])):
        at = 0
        for start, stop in needs.shard.key_runs[owner]:
            seen = intersect(part.keys, ((start, stop),))
            if seen:
                span = seen[0][0], seen[-1][1]
                here = kv.narrow(2, at + span[0] - start, span[1] - span[0])
                yield number, part_request(request, first, part, span, here[..., :width], here[..., width:])
            at += stop - start


@dataclasses.dataclass(frozen=True, eq=False)
class _Hop:
    """The tensors that are being received and sent; `outgoing` is kept alive until the transfer ends."""

    incoming: Tensor
    outgoing: Tensor
    works: list[dist.Work]

    def arrived(self) -> Tensor:
        """Wait for the transfers and return the received tensor."""
        for work in self.works:
            work.wait()
        return self.incoming


def _start(x: Tensor, shard: SequenceShard, owner: int, what: str, home: bool = False) -> _Hop:
    """Start to send x [B, Hkv, T, W] of process `owner` to the next process, and to receive the next tensor.

    The keys of the last step are not sent; gradients are, with `home`, because they must reach their owner.
    """
    processes = len(shard.runs)
    if processes == 1 or (not home and owner == (shard.rank + 1) % processes):
        return _Hop(x, x, [])
    x = x.contiguous()
    runs = shard.key_runs[(owner - 1) % processes]
    length = sum(stop - start for start, stop in runs)
    incoming = x.new_empty(*x.shape[:2], length, x.shape[3])
    count_transfer(what, x.nbytes, incoming.nbytes)
    if x.is_meta:  # only shapes are traced
        return _Hop(incoming, x, [])
    group = shard.group or dist.group.WORLD
    assert group is not None, "processes without a group have nothing to exchange"
    steps = []
    for operation, tensor, by in ((dist.isend, x, 1), (dist.irecv, incoming, -1)):
        if tensor.numel():
            peer = dist.get_global_rank(group, (shard.rank + by) % processes)
            steps.append(dist.P2POp(operation, tensor, peer, group))
    return _Hop(incoming, x, dist.batch_isend_irecv(steps) if steps else [])


def _tensors(relative: Relative | None) -> list[Tensor]:
    """Return the tensors of relative terms, in a fixed order."""
    if relative is None:
        return []
    return [x for name in (*TABLES, "content") if (x := getattr(relative, name)) is not None]


def _with(request: Request, q: Tensor, terms: Sequence[Tensor]) -> Request:
    """Return the request with other queries, and with `_tensors` of its relative terms replaced."""
    relative = request.relative
    if relative is not None:
        names = [name for name in (*TABLES, "content") if getattr(relative, name) is not None]
        relative = dataclasses.replace(relative, **dict(zip(names, terms)))
    return dataclasses.replace(request, q=q, relative=relative)


def run_exchanged(request: Request, needs: Needs, compute: Compute) -> tuple[Tensor, Tensor]:
    """Exchange the keys; return output [B, H, T, Dv] and log-sum-exp [B, H, T] of the process's queries."""
    rank, width = needs.shard.rank, request.k.shape[3]
    kv = exchange(request.k, request.v, needs)
    results = []
    for first, part in numbered(needs.parts[rank]):
        outs, lses = [], []
        for span in part.spans():
            here = keys_at(kv, needs.keys[rank], span)
            out, lse = compute(part_request(request, first, part, span, here[..., :width], here[..., width:]))
            outs.append(out)
            lses.append(lse)
        # The runs of keys are parts of one softmax.
        joined = join_by_lse(outs, lses) if outs else nothing_seen(request, part.queries[1] - part.queries[0])
        results.append(joined)
    out, lse = in_order(results or [nothing_seen(request, 0)])
    return anchored(out, kv), lse


def in_order(results: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the concatenated runs of queries: outputs [B, H, T, Dv] and log-sum-exps [B, H, T].

    The memory of the outputs is ordered by token, as the following layer reads all heads of a token.
    """
    if len(results) == 1:
        return results[0]
    outs, lses = zip(*results)
    return torch.cat([out.transpose(1, 2) for out in outs], 1).transpose(1, 2), torch.cat(lses, 2)


STRATEGIES = {"all": run_exchanged, "needed": run_exchanged, "ring": run_ring}

WORTH_A_RING = 0.5
"""Fraction of the keys of other processes that the queries need, from which on `auto` uses a ring."""


def choose_strategy(request: Request) -> tuple[Needs, str, str]:
    """Return the needs of the processes, the method of the exchange and the reason for it.

    The result is the same in every process. Raises `InputError` for a ring if the call does not allow it.
    """
    context, pattern = request.context, request.pattern
    shard, whole = context.shard, context.whole
    assert shard is not None
    assert whole is not None

    def needs() -> Needs:
        return find_needs(pattern, whole, shard, every=shard.strategy == "all")

    # A function may read values that change, so its needs are computed in every call.
    static = pattern is None or pattern.is_static()
    needed = whole.once(("needs", pattern, shard), needs) if static else needs()
    refused = refuses_ring(request)
    if shard.strategy == "ring" and refused:
        raise InputError(f"strategy: 'ring' cannot run this call: {refused}; use 'needed' or 'auto'")
    if shard.strategy != "auto":
        return needed, shard.strategy, "requested"
    part = needed.part_needed()
    if part < WORTH_A_RING:
        return needed, "needed", f"the layout lists {part:.0%} of the keys of others"
    if refused or len(shard.runs) < 3:
        return needed, "needed", refused or "with two processes a ring holds all keys at once too"
    return needed, "ring", f"the layout lists {part:.0%} of the keys of others: no process holds them all"
