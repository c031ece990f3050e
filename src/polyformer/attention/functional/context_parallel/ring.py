"""Ring attention: the keys of every process pass from process to process, overlapped with computation.

A process never has more keys in memory than its own keys and the keys of two other processes. In the backward
pass the keys pass around the ring again, followed by their gradients, and the parts are recomputed:

    out = sum_i w_i out_i      w_i = e^(lse_i - lse)      lse = log sum_i e^lse_i      over the parts i
    grad out_i = w_i grad out
    grad lse_i = w_i (grad out . (out_i - out) + grad lse)

Liu et al. 2023 (Ring Attention), section 3; here with any pattern, and the backends of any call.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from polyformer.attention.functional.context_parallel.needs import Needs
from polyformer.attention.functional.context_parallel.parts import (
    Compute,
    nothing_seen,
    numbered,
    part_request,
)
from polyformer.attention.functional.context_parallel.traffic import count_transfer
from polyformer.attention.functional.relative import TABLES, Relative
from polyformer.attention.functional.request import Request
from polyformer.attention.functional.splits.by_residue_class import join_by_lse
from polyformer.attention.patterns.layout import intersect
from polyformer.core.ops.autograd import WHOLE, autocast_disabled, first_order
from polyformer.core.sequence.sequence_shards import SequenceShard


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
