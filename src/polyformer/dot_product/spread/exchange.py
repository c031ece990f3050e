"""Keys and values sent to the processes whose queries need them, their gradients sent back and added up.

On the `meta` device, where shapes alone are traced, nothing is sent, and no process group is needed.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from polyformer.dot_product.spread.needs import Needs
from polyformer.dot_product.spread.traffic import count_transfer
from polyformer.patterns.layout import Interval, intersect, unite
from polyformer.sequence.shares import Share


class _ToPeers(torch.autograd.Function):
    """Rows [N, ...], so many for each process in turn -> the rows that those send here."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, group: Any, what: str, sent: list[int], received: list[int]
    ) -> Tensor:
        """One all-to-all."""
        ctx.group, ctx.what, ctx.sent, ctx.received = group, what, sent, received
        return _sent(rows, group, what, sent, received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients go where the rows came from."""
        rows = _sent(grad, ctx.group, f"gradients of {ctx.what}", ctx.received, ctx.sent)
        return rows, None, None, None, None


def _sent(rows: Tensor, group: Any, what: str, sent: list[int], received: list[int]) -> Tensor:
    if len(sent) == 1:
        return rows.clone()
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    if not rows.is_meta:
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    count_transfer(what, rows.nbytes, arrived.nbytes)
    return arrived


class _Gathered(torch.autograd.Function):
    """A tensor of every process, of one shape in all -> those of all processes, [P, ...]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: Share, what: str) -> Tensor:
        """One all-gather."""
        ctx.group, ctx.what = share.group, what
        x = x.contiguous()
        everybody = [torch.empty_like(x) for _ in share.runs]
        if not x.is_meta:
            dist.all_gather(everybody, x, group=share.group)
        count_transfer(what, x.nbytes * (len(everybody) - 1), x.nbytes * (len(everybody) - 1))
        return torch.stack(everybody)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of what this process showed, added up over all that saw it."""
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        others = len(grad) - 1
        count_transfer(f"gradients of {ctx.what}", *[2 * others * grad[0].nbytes] * 2)
        return grad[dist.get_rank(ctx.group)], None, None


def total(x: Tensor, share: Share) -> Tensor:
    """The sum of x over the processes of a share, without a gradient."""
    x = x.clone()
    if len(share.runs) > 1 and not x.is_meta:
        dist.all_reduce(x, group=share.group)
    return x


def total_of_parts(x: Tensor, share: Share) -> Tensor:
    """The sum of x over the processes of a share; its gradient counts this process's part as often as there
    are processes, so that the mean of their gradients is that of the sum."""
    part = x * len(share.runs)
    return part + (total(x.detach(), share) - part).detach()


def everywhere(x: Tensor, share: Share, what: str) -> Tensor:
    """x [B, T, ...] of all slots, from that of each process's tokens; without a gradient."""
    lengths = [sum(stop - start for start, stop in runs) for runs in share.runs]
    room = x.new_zeros(x.shape[0], max(lengths), *x.shape[2:])
    room[:, : x.shape[1]] = x.detach()
    gathered = gather(room, share, what)
    tokens = torch.cat([theirs[:, :length] for theirs, length in zip(gathered, lengths)], 1)
    return tokens[:, torch.cat([_slots(runs, x.device) for runs in share.runs]).argsort()]


def gather(x: Tensor, share: Share, what: str) -> Tensor:
    """x of every process of a share, which has one shape in all: [P, ...]."""
    return _Gathered.apply(x, share, what) if len(share.runs) > 1 else x.unsqueeze(0)


class _Anchored(torch.autograd.Function):
    """`out`, in whose graph `other` stands too: all processes take part in the backward pass of an exchange,
    one whose queries used nothing of it too."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, other: Tensor) -> Tensor:
        """`out` as it is."""
        ctx.shape, ctx.dtype, ctx.device = other.shape, other.dtype, other.device
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Nothing for `other`."""
        return grad, torch.zeros((), dtype=ctx.dtype, device=ctx.device).expand(ctx.shape)


def anchored(out: Tensor, other: Tensor) -> Tensor:
    """`out` with an edge to `other`, which gets zeros for gradients."""
    return _Anchored.apply(out, other) if torch.is_grad_enabled() and other.requires_grad else out


def exchange(k: Tensor, v: Tensor, needs: Needs, what: str = "keys and values") -> Tensor:
    """The keys that this process needs, [B, Hkv, N, D + Dv]: in rising order of slots, k and v side by side.

    k [B, Hkv, T, D], v [B, Hkv, T, Dv]: of the slots that the process holds, in its order, which rises.
    """
    share, rank = needs.share, needs.share.rank
    processes, held = range(len(share.runs)), share.keys.slots(k.device)
    sent = [_slots(needs.sent(rank, peer), k.device) for peer in processes]
    received = [_slots(needs.sent(peer, rank), k.device) for peer in processes]
    own = _slots(intersect(needs.keys[rank], unite(share.keys.own)), k.device)
    rows = torch.cat([k, v], -1).movedim(2, 0)
    arrived = _ToPeers.apply(
        rows.index_select(0, torch.searchsorted(held, torch.cat(sent))),
        share.group,
        what,
        list(map(len, sent)),
        list(map(len, received)),
    )
    rows = torch.cat([rows.index_select(0, torch.searchsorted(held, own)), arrived])
    return rows.index_select(0, torch.cat([own, *received]).argsort()).movedim(0, 2)


def _slots(runs: Sequence[Interval], device: torch.device) -> Tensor:
    """The slots of these runs, in order."""
    none = torch.zeros(0, dtype=torch.long, device=device)
    return torch.cat([none, *(torch.arange(start, stop, device=device) for start, stop in runs)])
