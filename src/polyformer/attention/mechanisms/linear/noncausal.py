"""Linear attention in which every query attends to every key: first the sums over all keys, then the queries.

    S = sum_j b_j [v_j, 1] f_j^T        [n_i, t_i] = S u_i        y_i = n_i / t_i

with u = phi(q), f = phi(k) without their scales and b_j = exp(weight_j + scale_j - top). Backward, from
g_i = grad [n_i, t_i] (see `sums.grad_ratio`):

    grad u_i = S^T g_i                    grad S = sum_i g_i u_i^T
    grad f_j = b_j grad S^T [v_j, 1]
    grad [v_j, 1] = b_j grad S f_j
    grad weight_j = [v_j, 1] . grad [v_j, 1]         (Euler: every contribution of key j is linear in both)

Features are computed in runs of tokens, and recomputed in the backward pass.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polyformer.attention.mechanisms.linear.feature_maps import Kernel
from polyformer.attention.mechanisms.linear.sums import (
    finite_top,
    grad_ratio,
    head_groups,
    invert_denominators,
    run_length,
    runs,
)
from polyformer.core.ops.autograd import autocast_disabled, first_order
from polyformer.core.ops.batched_products import product
from polyformer.core.ops.cpu import parallel_map


class NoncausalAttention(torch.autograd.Function):
    """q [N, Tq, D], k [N, Tk, D], [v, 1] [N, Tk, Dv + 1], log weight [N, Tk] -> [N, Tq, Dv]."""

    @staticmethod
    @autocast_disabled
    def forward(ctx: Any, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
        """Compute the sums over the keys, then y_i = S u_i / (z . u_i)."""
        out = q.new_empty(*q.shape[:2], v.shape[2] - 1)
        inverse, unraised = q.new_empty(q.shape[:2]), q.new_empty(q.shape[:2])
        all_sums, all_tops = v.new_empty(len(k), v.shape[2], kernel.width), weight.new_empty(len(k), 1)
        # The norm part of the scale is added for all runs at once, the rest run by run.
        weight = kernel.add_norm(k, weight)

        def work(groups: Sequence[slice]) -> None:
            for heads in groups:
                sums, top, mass = _key_sums(kernel, k[heads], v[heads], weight[heads])
                all_sums[heads], all_tops[heads] = sums, top
                total = inverse[heads]
                for step in runs(q.shape[1], run_length(kernel)):
                    # [n_i, t_i]: the last column is the denominator.
                    ratio = product(kernel.values(q[heads, step])[0], sums.mT)
                    out[heads, step], total[:, step] = ratio[..., :-1], ratio[..., -1]
                inverse[heads], unraised[heads] = invert_denominators(total, mass, kernel.least)
                out[heads] *= inverse[heads].unsqueeze(-1)

        parallel_map(work, head_groups(len(q), max(q.shape[1], k.shape[1]), kernel), q.device)
        ctx.kernel = kernel
        ctx.save_for_backward(q, k, v, weight, out, inverse, unraised, all_sums, all_tops)
        return out

    @staticmethod
    @first_order("attention by features, run by run,")
    @autocast_disabled
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of the queries first, which give grad S, then of the keys."""
        q, k, v, weight, out, inverse, unraised, all_sums, all_tops = ctx.saved_tensors
        kernel: Kernel = ctx.kernel
        grad_q, grad_k, grad_v, grad_weight = (torch.empty_like(x) for x in (q, k, v, weight))

        def work(groups: Sequence[slice]) -> None:
            for heads in groups:
                grad_sums = torch.zeros_like(all_sums[heads])
                for step in runs(q.shape[1], run_length(kernel)):
                    at = heads, step
                    g = grad_ratio(grad[at], out[at], inverse[at], unraised[at])
                    phi_q, _ = kernel.values(q[at])
                    # grad S = sum_i g_i u_i^T
                    grad_sums += product(g.mT.contiguous(), phi_q)
                    grad_q[at] = kernel.backward(q[at], phi_q, product(g, all_sums[heads]), None)
                for step in runs(k.shape[1], run_length(kernel)):
                    at = heads, step
                    phi_k, scale = kernel.values(k[at])
                    share = (weight[at] + (scale - all_tops[heads])).exp_().unsqueeze(-1)
                    # grad [v_j, 1] = b_j grad S f_j
                    grad_v[at] = product(phi_k, grad_sums.mT).mul_(share)
                    # Euler: [v_j, 1] . grad [v_j, 1]
                    grad_weight[at] = (v[at] * grad_v[at]).sum(-1)
                    grad_phi_k = product(v[at] * share, grad_sums)
                    grad_k[at] = kernel.backward(k[at], phi_k, grad_phi_k, grad_weight[at])

        parallel_map(work, head_groups(len(q), max(q.shape[1], k.shape[1]), kernel), q.device)
        return None, grad_q, grad_k, grad_v, grad_weight


def _key_sums(kernel: Kernel, k: Tensor, v: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return S [N, Dv + 1, M] of all keys, its (finite) top [N, 1], and the sum of the keys' weights [N, 1].

    Each run has a separate top; at the end all runs are rescaled to the maximum.
    """
    steps = runs(k.shape[1], run_length(kernel))
    sums = v.new_zeros(len(steps), len(k), v.shape[2], kernel.width)
    mass, tops = weight.new_zeros(len(steps), len(k), 1), weight.new_empty(len(steps), len(k), 1)
    for number, step in enumerate(steps):
        phi, scale = kernel.values(k[:, step])
        log_weight = weight[:, step] + scale
        tops[number] = finite_top(log_weight.amax(-1, keepdim=True))
        share = log_weight.sub_(tops[number]).exp_()
        mass[number] = share.sum(-1, keepdim=True)
        sums[number] = product((v[:, step] * share.unsqueeze(-1)).mT.contiguous(), phi)
    if len(steps) == 1:
        return sums[0], tops[0], mass[0]
    top = tops.amax(0) if steps else finite_top(weight.new_full((len(k), 1), -torch.inf))
    # From the top of each run to the common top.
    kept = (tops - top).exp_()
    return (sums * kept.unsqueeze(-1)).sum(0), top, (mass * kept).sum(0)
