"""Causal linear attention in one sweep over runs of tokens, forward and backward.

The sums S = sum_j w_j v_j phi(k_j)^T and z = sum_j w_j phi(k_j) pass from run to run; inside a run all pairs
are computed explicitly. No features are saved: they are computed run by run, in a processor's cache, and
recomputed in the backward pass, which saves only inputs, output and the sums before each run. Heads are
distributed over a CPU's threads. The computation of a run is in `causal_forward.py`, its gradients in
`causal_backward.py`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polyformer.attention.mechanisms.linear.causal_backward import grad_decay, run_backward
from polyformer.attention.mechanisms.linear.causal_forward import Run, run_forward
from polyformer.attention.mechanisms.linear.feature_maps import Kernel
from polyformer.attention.mechanisms.linear.sums import RUN, Sums, head_groups, runs
from polyformer.attention.mechanisms.linear.weights import grad_ratio
from polyformer.core.ops.cpu_threads import parallel_map
from polyformer.core.ops.precision import autocast_disabled
from polyformer.core.ops.second_order import first_order


class CausalAttention(torch.autograd.Function):
    """q, k [N, T, D], v [N, T, Dv], log weight and decay [N, T], past sums -> out [N, T, Dv], next sums."""

    @staticmethod
    @autocast_disabled
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
        """Compute the runs from the first to the last.

        graph: whether the sums before each run are saved for the backward pass.
        """
        steps = runs(q.shape[1], RUN)
        out, inverse, unraised = torch.empty_like(v), torch.empty_like(weight), torch.empty_like(weight)
        # Cloned, because the sums are updated in place.
        after = Sums(*(x.clone() for x in past))
        before = tuple(x.new_empty(len(steps) if graph else 0, *x.shape) for x in after[:3])

        def work(groups: Sequence[slice]) -> None:
            for heads in groups:
                sums = Sums(*(x[heads] for x in after))
                for number, step in enumerate(steps):
                    if graph:
                        for table, value in zip(before, sums):
                            table[number, heads] = value
                    at = heads, step
                    run = Run(kernel, q[at], k[at], v[at], weight[at], _at(decay, at), sums.top)
                    out[at], inverse[at], unraised[at], sums = run_forward(run, sums)
                for table, value in zip(after, sums):
                    table[heads] = value

        parallel_map(work, head_groups(len(q), min(RUN, q.shape[1]), kernel))
        ctx.kernel = kernel
        ctx.save_for_backward(q, k, v, weight, decay, out, inverse, unraised, *before, *after[:2])
        # top and mass only rescale: gradients treat them as constants.
        ctx.mark_non_differentiable(after.top, after.mass)
        ctx.set_materialize_grads(False)
        return (out, *after)

    @staticmethod
    @first_order("attention by features, run by run,")
    @autocast_disabled
    def backward(ctx: Any, grad: Tensor | None, *grad_sums: Tensor | None) -> tuple[Tensor | None, ...]:
        """Compute the runs in reverse with `run_backward`, passing on the gradients of the sums."""
        q, k, v, weight, decay, out, inverse, unraised, *tables, last_s, last_z = ctx.saved_tensors
        kernel, steps, (sums, norms, top) = ctx.kernel, runs(q.shape[1], RUN), tables
        grad = torch.zeros_like(out) if grad is None else grad
        grad_s, grad_z = (
            torch.zeros_like(x) if grad_x is None else grad_x.clone()
            for x, grad_x in zip((last_s, last_z), grad_sums)
        )
        # The part of grad F_T that comes from the last sums (see `causal_backward`).
        grad_last = (grad_s * last_s).sum((1, 2)) + (grad_z * last_z).sum(1)
        gradients = tuple(torch.empty_like(x) for x in (q, k, v, weight, weight))

        def work(groups: Sequence[slice]) -> None:
            for heads in groups:
                grad_next = grad_s[heads], grad_z[heads]
                for number, step in reversed(list(enumerate(steps))):
                    at = heads, step
                    run = Run(kernel, q[at], k[at], v[at], weight[at], _at(decay, at), top[number, heads])
                    ratio = grad_ratio(grad[at], out[at], inverse[at], unraised[at])
                    past = sums[number, heads], norms[number, heads]
                    grad_run, grad_next = run_backward(run, *ratio, past, grad_next)
                    for table, value in zip(gradients, grad_run):
                        table[at] = value
                grad_s[heads], grad_z[heads] = grad_next

        parallel_map(work, head_groups(len(q), min(RUN, q.shape[1]), kernel))
        grad_q, grad_k, grad_v, grad_log_query, grad_log_key = gradients
        grad_decays = None if decay is None else grad_decay(grad_log_query, grad_log_key, grad_last)
        return None, None, grad_q, grad_k, grad_v, grad_log_key, grad_decays, grad_s, grad_z, None, None


def _at(table: Tensor | None, at: tuple[slice, slice]) -> Tensor | None:
    return None if table is None else table[at]
