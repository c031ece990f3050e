"""Attention by features where every query attends to every key: the sums over all keys, then one read each.

    S = sum_j b_j v_j f_j^T        z = sum_j b_j f_j        y_i = n_i / t_i,  n_i = S u_i,  t_i = z . u_i

with u = phi(q), f = phi(k) without their scales and b_j = exp(weight_j + scale_j - top). Backward, from
grad n_i and grad t_i (see `weights.grad_ratio`):

    grad u_i = S^T grad n_i + grad t_i z
    grad S   = sum_i grad n_i u_i^T        grad z = sum_i grad t_i u_i
    grad f_j = b_j (grad S^T v_j + grad z)
    grad v_j = b_j grad S f_j
    grad weight_j = f_j . grad f_j         (Euler, as b_j f_j is all that key j adds)

Features are computed in runs of tokens, and again in the backward pass.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from polyformer.attention.linear.feature_maps import Kernel
from polyformer.attention.linear.sums import absorb, head_groups, matrix_vector, no_sums, runs, weighted_sum
from polyformer.attention.linear.weights import finite_top, grad_ratio, inverted
from polyformer.ops.precision import as_written
from polyformer.ops.products import product
from polyformer.ops.workers import spread

WIDE = 256
"""Tokens of a run."""


class NoncausalAttention(torch.autograd.Function):
    """q [N, Tq, D], k, v [N, Tk, D or Dv], log weight [N, Tk] -> [N, Tq, Dv]."""

    @staticmethod
    @as_written
    def forward(ctx: Any, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
        """The sums over the keys, then y_i = S u_i / (z . u_i)."""
        out, inverse, unraised = (q.new_empty(*q.shape[:2], *end) for end in ((v.shape[2],), (), ()))
        all_s, all_z = v.new_zeros(len(k), v.shape[2], kernel.width), v.new_zeros(len(k), kernel.width)
        top = weight.new_empty(len(k), 1)

        def work(groups: Sequence[slice]) -> None:
            for heads in groups:
                sums = no_sums(len(k[heads]), v.shape[2], kernel)
                for step in runs(k.shape[1], WIDE):
                    sums = absorb(kernel, k[heads, step], v[heads, step], weight[heads, step], sums)
                all_s[heads], all_z[heads] = sums.numerators, sums.denominators
                top[heads] = finite_top(sums.top).unsqueeze(-1)
                for step in runs(q.shape[1], WIDE):
                    at = heads, step
                    phi_q, _ = kernel.features(q[at])
                    total = matrix_vector(phi_q, sums.denominators)
                    mass = sums.mass.unsqueeze(-1)
                    inverse[at], unraised[at] = inverted(total, mass, kernel.floor)
                    number = product(phi_q, sums.numerators.mT)
                    out[at] = number.mul_(inverse[at].unsqueeze(-1))

        spread(work, head_groups(len(q), WIDE, kernel))
        ctx.kernel = kernel
        ctx.save_for_backward(q, k, v, weight, out, inverse, unraised, all_s, all_z, top)
        return out

    @staticmethod
    @once_differentiable
    @as_written
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The queries first, which give grad S and grad z, then the keys."""
        q, k, v, weight, out, inverse, unraised, all_s, all_z, top = ctx.saved_tensors
        kernel: Kernel = ctx.kernel
        grad_q, grad_k, grad_v, grad_weight = (torch.empty_like(x) for x in (q, k, v, weight))

        def work(groups: Sequence[slice]) -> None:
            for heads in groups:
                grad_s, grad_z = torch.zeros_like(all_s[heads]), torch.zeros_like(all_z[heads])
                for step in runs(q.shape[1], WIDE):
                    at = heads, step
                    grad_number, grad_total = grad_ratio(grad[at], out[at], inverse[at], unraised[at])
                    phi_q, _ = kernel.features(q[at])
                    grad_phi_q = product(grad_number, all_s[heads])
                    grad_phi_q.addcmul_(grad_total.unsqueeze(-1), all_z[heads].unsqueeze(1))
                    grad_q[at] = kernel.backward(q[at], phi_q, grad_phi_q, None)
                    grad_s += product(grad_number.mT.contiguous(), phi_q)
                    grad_z += weighted_sum(grad_total, phi_q)
                for step in runs(k.shape[1], WIDE):
                    at = heads, step
                    phi_k, scale = kernel.features(k[at])
                    share = (weight[at] + scale - top[heads]).exp_().unsqueeze(-1)
                    grad_phi_k = product(v[at], grad_s).add_(grad_z.unsqueeze(1)).mul_(share)
                    grad_v[at] = product(phi_k, grad_s.mT).mul_(share)
                    grad_weight[at] = (phi_k * grad_phi_k).sum(-1)
                    grad_k[at] = kernel.backward(k[at], phi_k, grad_phi_k, grad_weight[at])

        spread(work, head_groups(len(q), WIDE, kernel))
        return None, grad_q, grad_k, grad_v, grad_weight
