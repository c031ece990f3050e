"""Linear attention in one sweep over runs of tokens, forward and backward; no features are ever kept.

The sums S = sum_j w_j phi(k_j) v_j^T and z = sum_j w_j phi(k_j) pass from run to run; inside a run the pairs
are multiplied out. Features are computed run by run, in a processor's cache, and again in the backward pass,
which needs beside inputs and output only the sums before each run. Heads are spread over a CPU's threads.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from polyformer.ops.precision import as_written
from polyformer.ops.products import product
from polyformer.ops.random_features import Kernel
from polyformer.ops.workers import spread

RUN = 128
"""Tokens whose pairs are multiplied out."""

WIDE = 256
"""Tokens computed together where there are no pairs."""

CACHED = 1 << 17
"""Features of the heads that are computed together, at most."""


class Past(NamedTuple):
    """What the keys so far come to: S [N, Dv, M], z [N, M], both times e^-top, and the sum of weights.

    top [N] is the greatest log weight so far, seen from the present token; `mass` [N] the sum of e^(w - top).
    """

    sums: Tensor
    norms: Tensor
    top: Tensor
    mass: Tensor


class Shares(NamedTuple):
    """How the keys of a run weigh: in pairs with its queries [N, C, C], the past for each query [N, C], each
    key in the next sums [N, C], the past in the next sums [N], and the next `top` [N]."""

    pairs: Tensor
    past: Tensor
    keys: Tensor
    kept: Tensor
    top: Tensor


def shares(weight: Tensor, decay: Tensor | None, top: Tensor) -> Shares:
    """log weights [N, C] of the keys, log decays [N, C] before each token, and the past's `top` [N].

    All are relative to the greatest weight that a query sees, a running maximum: exact, and of the past
    alone. A decay up to a token divides all that follows, which is the same as weighing later keys more.
    """
    if decay is not None:
        faded = decay.cumsum(-1)
        weight = weight - faded
    running = torch.maximum(weight.cummax(-1).values, top.unsqueeze(-1))
    safe = _safe(running)
    last = safe[:, -1:]
    pairs = (weight.unsqueeze(1) - safe.unsqueeze(2)).exp_().tril_()
    past, keys = (top.unsqueeze(-1) - safe).exp_(), (weight - last).exp_()
    top_next = running[:, -1] if decay is None else running[:, -1] + faded[:, -1]
    return Shares(pairs, past, keys, past[:, -1], top_next)


def bounded(total: Tensor, mass: Tensor, floor: float) -> Tensor:
    """Denominators, raised to `floor` * mass where they are less, which is a constant to gradients.

    Without a floor they stay what they are, negative ones too: only what could not be divided by is raised.
    """
    least = (mass.detach() * floor).clamp_min(torch.finfo(total.dtype).tiny ** 0.8)
    return torch.where((total if floor else total.abs()) > least, total, least)


def inverted(total: Tensor, mass: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """1 / denominator, and the same with zeros where the denominator was raised to its floor."""
    raised = bounded(total, mass, floor)
    inverse = raised.reciprocal()
    return inverse, inverse * (raised == total)


def groups(heads: int, length: int, kernel: Kernel) -> list[slice]:
    """Runs of the N heads: all at once on an accelerator, on a CPU what a cache holds and threads share."""
    most = heads
    if not kernel.directions.is_cuda:
        fits = CACHED // (min(RUN, length) * kernel.width)
        most = max(1, min(fits, -(-heads // torch.get_num_threads())))
    return runs(heads, most)


def runs(length: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


class Causal(torch.autograd.Function):
    """q, k [N, T, D], v [N, T, Dv], log weight and decay [N, T], past -> out [N, T, Dv] and the next past."""

    @staticmethod
    @as_written
    def forward(
        ctx: Any,
        kernel: Kernel,
        graph: bool,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        weight: Tensor,
        decay: Tensor | None,
        *past: Tensor,
    ) -> tuple[Tensor, ...]:
        steps = runs(q.shape[1], RUN)
        out, inverse, free = torch.empty_like(v), torch.empty_like(weight), torch.empty_like(weight)
        after = Past(*(x.clone() for x in past))
        before = tuple(x.new_empty(len(steps) if graph else 0, *x.shape) for x in after[:3])

        def work(items: Sequence[slice]) -> None:
            for own in items:
                state = Past(*(x[own] for x in after))
                for number, step in enumerate(steps):
                    if graph:
                        for table, value in zip(before, state):
                            table[number, own] = value
                    at = own, step
                    run = _Run(kernel, q[at], k[at], v[at], weight[at], _at(decay, at), state.top)
                    out[at], inverse[at], free[at], state = run.forward(state)
                for table, value in zip(after, state):
                    table[own] = value

        spread(work, groups(len(q), q.shape[1], kernel))
        ctx.kernel = kernel
        ctx.save_for_backward(q, k, v, weight, decay, out, inverse, free, *before, *after[:2])
        ctx.mark_non_differentiable(after.top, after.mass)
        ctx.set_materialize_grads(False)
        return (out, *after)

    @staticmethod
    @once_differentiable
    @as_written
    def backward(ctx: Any, grad: Tensor | None, *of_past: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, weight, decay, out, inverse, free, sums, norms, top, last_sums, last_norms = (
            ctx.saved_tensors
        )
        kernel, steps = ctx.kernel, runs(q.shape[1], RUN)
        grad = torch.zeros_like(out) if grad is None else grad
        of_sums, of_norms = (
            torch.zeros_like(x) if one is None else one.clone()
            for x, one in zip((last_sums, last_norms), of_past)
        )
        later = (of_sums * last_sums).sum((1, 2)) + (of_norms * last_norms).sum(1)
        dq, dk, dv, of_query, of_key = (torch.empty_like(x) for x in (q, k, v, weight, weight))

        def work(items: Sequence[slice]) -> None:
            for own in items:
                ahead = of_sums[own], of_norms[own]
                for number, step in reversed(list(enumerate(steps))):
                    at = own, step
                    run = _Run(kernel, q[at], k[at], v[at], weight[at], _at(decay, at), top[number, own])
                    told = _told(grad[at], out[at], inverse[at], free[at])
                    past = sums[number, own], norms[number, own]
                    dq[at], dk[at], dv[at], of_query[at], of_key[at], ahead = run.backward(*told, past, ahead)
                of_sums[own], of_norms[own] = ahead

        spread(work, groups(len(q), q.shape[1], kernel))
        of_decay = None
        if decay is not None:
            # Decay t fades every pair of a query from t on and a key before it, and what the past leaves.
            of_decay = (of_query - of_key).flip(-1).cumsum(-1).flip(-1) + later.unsqueeze(-1)
        return None, None, dq, dk, dv, of_key, of_decay, of_sums, of_norms, None, None


class Whole(torch.autograd.Function):
    """Every query sees every key: q [N, Tq, D], k, v [N, Tk, D or Dv], weight [N, Tk] -> [N, Tq, Dv]."""

    @staticmethod
    @as_written
    def forward(ctx: Any, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
        out, inverse, free = (q.new_empty(*q.shape[:2], *end) for end in ((v.shape[2],), (), ()))
        sums, norms = v.new_zeros(len(k), v.shape[2], kernel.width), v.new_zeros(len(k), kernel.width)
        top = weight.new_empty(len(k), 1)

        def work(items: Sequence[slice]) -> None:
            for own in items:
                state = empty(len(k[own]), v.shape[2], kernel)
                for step in runs(k.shape[1], WIDE):
                    state = _absorbed(kernel, k[own, step], v[own, step], weight[own, step], state)
                sums[own], norms[own], top[own] = state.sums, state.norms, _safe(state.top).unsqueeze(-1)
                for step in runs(q.shape[1], WIDE):
                    features, _ = kernel.features(q[own, step])
                    total = _times(features, state.norms)
                    mass = state.mass.unsqueeze(-1)
                    inverse[own, step], free[own, step] = inverted(total, mass, kernel.floor)
                    read = product(features, state.sums.mT)
                    out[own, step] = read.mul_(inverse[own, step].unsqueeze(-1))

        spread(work, groups(len(q), WIDE, kernel))
        ctx.kernel = kernel
        ctx.save_for_backward(q, k, v, weight, out, inverse, free, sums, norms, top)
        return out

    @staticmethod
    @once_differentiable
    @as_written
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, weight, out, inverse, free, sums, norms, top = ctx.saved_tensors
        kernel: Kernel = ctx.kernel
        dq, dk, dv, of_key = (torch.empty_like(x) for x in (q, k, v, weight))

        def work(items: Sequence[slice]) -> None:
            for own in items:
                of_sums, of_norms = torch.zeros_like(sums[own]), torch.zeros_like(norms[own])
                for step in runs(q.shape[1], WIDE):
                    at = own, step
                    of_number, of_total = _told(grad[at], out[at], inverse[at], free[at])
                    features, _ = kernel.features(q[at])
                    slope = product(of_number, sums[own])
                    slope.addcmul_(of_total.unsqueeze(-1), norms[own].unsqueeze(1))
                    dq[at] = kernel.gradient(q[at], features, slope, None)
                    of_sums += product(of_number.mT.contiguous(), features)
                    of_norms += _summed(of_total, features)
                for step in runs(k.shape[1], WIDE):
                    at = own, step
                    features, scale = kernel.features(k[at])
                    share = (weight[at] + scale - top[own]).exp_().unsqueeze(-1)
                    slope = product(v[at], of_sums).add_(of_norms.unsqueeze(1)).mul_(share)
                    dv[at] = product(features, of_sums.mT).mul_(share)
                    of_key[at] = (features * slope).sum(-1)
                    dk[at] = kernel.gradient(k[at], features, slope, of_key[at])

        spread(work, groups(len(q), WIDE, kernel))
        return None, dq, dk, dv, of_key


def empty(heads: int, width: int, kernel: Kernel) -> Past:
    """The past before the first key."""
    table = kernel.directions
    none = table.new_zeros(heads)
    return Past(
        table.new_zeros(heads, width, kernel.width),
        table.new_zeros(heads, kernel.width),
        none - torch.inf,
        none,
    )


class _Run:
    """A run of C tokens: their features, how its keys weigh, and the products of its pairs."""

    def __init__(
        self,
        kernel: Kernel,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        weight: Tensor,
        decay: Tensor | None,
        top: Tensor,
    ):
        self.kernel, self.q, self.k, self.v = kernel, q, k, v
        (self.of_q, _), (self.of_k, scale) = kernel.features(q), kernel.features(k)
        self.shares = shares(weight + scale, decay, top)
        self.scores = product(self.of_q, self.of_k.mT).mul_(self.shares.pairs)

    def forward(self, past: Past) -> tuple[Tensor, Tensor, Tensor, Past]:
        """Output [N, C, Dv], the denominators as `inverted` gives them, and the next past."""
        one = self.shares
        total = self.scores.sum(-1).addcmul_(_times(self.of_q, past.norms), one.past)
        mass = one.pairs.sum(-1).addcmul_(past.mass.unsqueeze(-1), one.past)
        inverse, free = inverted(total, mass, self.kernel.floor)
        number = product(self.scores, self.v)
        number.addcmul_(product(self.of_q, past.sums.mT), one.past.unsqueeze(-1))
        weighed = (self.v * one.keys.unsqueeze(-1)).mT.contiguous()
        sums = product(weighed, self.of_k).add_(past.sums * one.kept.view(-1, 1, 1))
        norms = _summed(one.keys, self.of_k).addcmul_(past.norms, one.kept.unsqueeze(-1))
        return number.mul_(inverse.unsqueeze(-1)), inverse, free, Past(sums, norms, one.top, mass[:, -1])

    def backward(
        self, of_number: Tensor, of_total: Tensor, past: tuple[Tensor, Tensor], ahead: tuple[Tensor, Tensor]
    ) -> tuple[Any, ...]:
        """Gradients of q, k, v, of the log of each query and key (by Euler: features times their gradients),
        and of the past, from those of the numerators, the denominators and the next past."""
        one, (sums, norms), (of_sums, of_norms) = self.shares, past, ahead
        past_share, keys = one.past.unsqueeze(-1), one.keys.unsqueeze(-1)
        of_scores = product(of_number, self.v.mT).add_(of_total.unsqueeze(-1)).mul_(one.pairs)
        of_number_past, of_total_past = of_number * past_share, of_total * one.past
        slope_q = product(of_scores, self.of_k).add_(product(of_number_past, sums))
        slope_q.addcmul_(of_total_past.unsqueeze(-1), norms.unsqueeze(1))
        slope_k = product(of_scores.mT.contiguous(), self.of_q)
        slope_k.add_(product(self.v * keys, of_sums)).addcmul_(keys, of_norms.unsqueeze(1))
        dv = product(self.scores.mT.contiguous(), of_number)
        dv.addcmul_(product(self.of_k, of_sums.mT), keys)
        of_query, of_key = (self.of_q * slope_q).sum(-1), (self.of_k * slope_k).sum(-1)
        before = product(of_number_past.mT.contiguous(), self.of_q)
        of_norms = _summed(of_total_past, self.of_q).addcmul_(of_norms, one.kept.unsqueeze(-1))
        return (
            self.kernel.gradient(self.q, self.of_q, slope_q, None),
            self.kernel.gradient(self.k, self.of_k, slope_k, of_key),
            dv,
            of_query,
            of_key,
            (before.add_(of_sums * one.kept.view(-1, 1, 1)), of_norms),
        )


def _absorbed(kernel: Kernel, k: Tensor, v: Tensor, weight: Tensor, past: Past) -> Past:
    """The past and all of these keys."""
    features, scale = kernel.features(k)
    weight = weight + scale
    top = torch.maximum(weight.amax(-1), past.top)
    share, kept = (weight - _safe(top).unsqueeze(-1)).exp_(), (past.top - _safe(top)).exp_()
    sums = product((v * share.unsqueeze(-1)).mT.contiguous(), features)
    return Past(
        sums.add_(past.sums * kept.view(-1, 1, 1)),
        _summed(share, features).addcmul_(past.norms, kept.unsqueeze(-1)),
        top,
        share.sum(-1).addcmul_(past.mass, kept),
    )


def absorb_token(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, decay: Tensor | None, past: Past
) -> tuple[Tensor, Past]:
    """The recurrence, for one token a row: output [N, 1, Dv] and the next past."""
    (of_q, _), (of_k, scale) = kernel.features(q[:, 0]), kernel.features(k[:, 0])
    weight = weight[:, 0] + scale
    faded = past.top if decay is None else past.top + decay[:, 0]
    top = torch.maximum(weight, faded).detach()
    share, kept = (weight - _safe(top)).exp().unsqueeze(-1), (faded - _safe(top)).exp().unsqueeze(-1)
    value = (v[:, 0] * share).unsqueeze(2)
    sums = torch.baddbmm(past.sums * kept.unsqueeze(-1), value, of_k.unsqueeze(1))
    norms = past.norms * kept + of_k * share
    mass = (past.mass * kept.squeeze(-1) + share.squeeze(-1)).detach()
    total = bounded((norms * of_q).sum(-1), mass, kernel.floor)
    out = _times(sums, of_q) / total.unsqueeze(-1)
    return out.unsqueeze(1), Past(sums, norms, top, mass)


def _told(grad: Tensor, out: Tensor, inverse: Tensor, free: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of numerators [N, C, Dv] and denominators [N, C]."""
    return grad * inverse.unsqueeze(-1), -(grad * out).sum(-1) * free


def _times(matrix: Tensor, vector: Tensor) -> Tensor:
    return torch.bmm(matrix, vector.unsqueeze(-1)).squeeze(-1)


def _summed(weights: Tensor, rows: Tensor) -> Tensor:
    """weights [N, C], rows [N, C, M] -> [N, M]."""
    return torch.bmm(weights.unsqueeze(1), rows).squeeze(1)


def _safe(top: Tensor) -> Tensor:
    """So that nothing seen yet gives e^(-inf - top) = 0."""
    return top.clamp_min(torch.finfo(top.dtype).min)


def _at(table: Tensor | None, at: tuple[slice, slice]) -> Tensor | None:
    return None if table is None else table[at]
