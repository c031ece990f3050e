"""Exchange of keys and values: each process receives the keys of its queries and returns their gradients.

On the `meta` device, which only traces shapes, nothing is sent, and no process group is needed.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from polyformer.attention.functional.context_parallel.needs import Needs
from polyformer.attention.functional.context_parallel.traffic import count_transfer
from polyformer.attention.patterns.layout import Interval, intersect, unite
from polyformer.core.ops.autograd import WHOLE, first_order
from polyformer.core.sequence.sequence_shards import SequenceShard


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
