"""Causal linear attention in one sweep over runs of tokens, forward and backward.

The sums S = sum_j w_j v_j phi(k_j)^T and z = sum_j w_j phi(k_j) pass from run to run; inside a run all pairs
are computed explicitly. No features are saved: they are computed run by run, in a processor's cache, and
recomputed in the backward pass, which saves only inputs, output and the sums before each run. Heads are
distributed over a CPU's threads.

With u = phi(q) and f = phi(k) without their scales, S and z the sums before the run, and weights relative to
the running maximum (`sums.py`): w_ij of the pairs, a_i of the past, b_j of the keys in the next sums, c of
the past in the next sums, the queries i and keys j of a run give

    s_ij = w_ij (u_i . f_j)                                    scores
    n_i = sum_j s_ij v_j + a_i S u_i                           numerators
    t_i = sum_j s_ij + a_i z . u_i                             denominators
    y_i = n_i / t_i
    S' = sum_j b_j v_j f_j^T + c S        z' = sum_j b_j f_j + c z

The gradients follow from grad n_i and grad t_i of the run's numerators and denominators, and grad S', grad z'
of the next sums:

    grad s_ij = grad n_i . v_j + grad t_i                      of the scores
    g_ij      = w_ij grad s_ij                                 of the products u_i . f_j
    grad u_i  = sum_j g_ij f_j + a_i (S^T grad n_i + grad t_i z)
    grad f_j  = sum_i g_ij u_i + b_j (grad S'^T v_j + grad z')
    grad v_j  = sum_i s_ij grad n_i + b_j grad S' f_j
    grad S    = sum_i a_i grad n_i u_i^T + c grad S'
    grad z    = sum_i a_i grad t_i u_i   + c grad z'

Log weights. Every contribution of key j is proportional to e^(weight_j) f_j, so by Euler's theorem

    grad weight_j = f_j . grad f_j                             and the same for the scale of phi(k_j)

Decays. With F_i the sum of the decays up to token i, w_ij = exp(weight_j - F_j + F_i), and the sums after the
last token T contain e^(F_T - F_j). So

    grad F_i     = u_i . grad u_i - f_i . grad f_i,    and for i = T also <grad S_T, S_T> + <grad z_T, z_T>
    grad decay_t = sum over i >= t of grad F_i
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyformer.attention.mechanisms.linear.feature_maps import Kernel
from polyformer.attention.mechanisms.linear.sums import (
    RUN,
    Sums,
    grad_ratio,
    head_groups,
    invert_denominators,
    matrix_vector,
    run_weights,
    runs,
    weighted_sum,
)
from polyformer.core.ops.batched_products import product
from polyformer.core.ops.cpu_threads import parallel_map
from polyformer.core.ops.precision import autocast_disabled
from polyformer.core.ops.second_order import first_order


class Run:
    """A run of C tokens of N heads: their features, the weights of its keys, and the scores of its pairs."""

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
        (self.phi_q, _), (self.phi_k, scale) = kernel.values(q), kernel.features(k)
        # The scale of a key is part of its weight; the scale of a query cancels.
        self.weights = run_weights(weight + scale, decay, top)
        self.scores = product(self.phi_q, self.phi_k.mT).mul_(self.weights.pairs)


def run_forward(run: Run, past: Sums) -> tuple[Tensor, Tensor, Tensor, Sums]:
    """Return the output [N, C, Dv], the results of `invert_denominators`, and the next sums."""
    w = run.weights
    total = run.scores.sum(-1).addcmul_(matrix_vector(run.phi_q, past.denominators), w.past)
    # The denominators if every u . f were 1, for their lower bound.
    mass = w.pairs.sum(-1).addcmul_(past.mass.unsqueeze(-1), w.past)
    inverse, unraised = invert_denominators(total, mass, run.kernel.least)
    number = product(run.scores, run.v)
    number.addcmul_(product(run.phi_q, past.numerators.mT), w.past.unsqueeze(-1))
    weighted_v = (run.v * w.keys.unsqueeze(-1)).mT.contiguous()
    numerators = product(weighted_v, run.phi_k).add_(past.numerators * w.kept.view(-1, 1, 1))
    denominators = weighted_sum(w.keys, run.phi_k).addcmul_(past.denominators, w.kept.unsqueeze(-1))
    out = number.mul_(inverse.unsqueeze(-1))
    return out, inverse, unraised, Sums(numerators, denominators, w.top, mass[:, -1])


class RunGradients(NamedTuple):
    """The gradients of q, k, v, and u . grad u [N, C], f . grad f [N, C] of every query and key."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_query: Tensor
    log_key: Tensor


def run_backward(
    run: Run,
    grad_number: Tensor,
    grad_total: Tensor,
    past: tuple[Tensor, Tensor],
    grad_next: tuple[Tensor, Tensor],
) -> tuple[RunGradients, tuple[Tensor, Tensor]]:
    """Return the gradients of a run's inputs, and grad (S, z) of the sums before it.

    Args:
        run: the run, recomputed from its inputs.
        grad_number, grad_total: grad n and grad t.
        past: (S, z) before the run.
        grad_next: grad (S', z') after the run.
    """
    w, (past_s, past_z), (grad_s, grad_z) = run.weights, past, grad_next
    past_share, key_share = w.past.unsqueeze(-1), w.keys.unsqueeze(-1)
    # g_ij = w_ij (grad n_i . v_j + grad t_i)
    grad_pairs = product(grad_number, run.v.mT).add_(grad_total.unsqueeze(-1)).mul_(w.pairs)
    grad_number_past, grad_total_past = grad_number * past_share, grad_total * w.past
    # grad u_i: over the keys of the run, then over the sums of the past.
    grad_phi_q = product(grad_pairs, run.phi_k).add_(product(grad_number_past, past_s))
    grad_phi_q.addcmul_(grad_total_past.unsqueeze(-1), past_z.unsqueeze(1))
    # grad f_j: over the queries of the run, then through the next sums.
    grad_phi_k = product(grad_pairs.mT.contiguous(), run.phi_q)
    grad_phi_k.add_(product(run.v * key_share, grad_s)).addcmul_(key_share, grad_z.unsqueeze(1))
    # grad v_j, over the same two paths.
    grad_v = product(run.scores.mT.contiguous(), grad_number)
    grad_v.addcmul_(product(run.phi_k, grad_s.mT), key_share)
    grad_log_query = (run.phi_q * grad_phi_q).sum(-1)
    grad_log_key = (run.phi_k * grad_phi_k).sum(-1)
    # grad S and grad z of the sums before the run.
    grad_past_s = product(grad_number_past.mT.contiguous(), run.phi_q)
    grad_past_z = weighted_sum(grad_total_past, run.phi_q).addcmul_(grad_z, w.kept.unsqueeze(-1))
    gradients = RunGradients(
        run.kernel.backward(run.q, run.phi_q, grad_phi_q, None),
        run.kernel.backward(run.k, run.phi_k, grad_phi_k, grad_log_key),
        grad_v,
        grad_log_query,
        grad_log_key,
    )
    return gradients, (grad_past_s.add_(grad_s * w.kept.view(-1, 1, 1)), grad_past_z)


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

        parallel_map(work, head_groups(len(q), min(RUN, q.shape[1]), kernel), q.device)
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
        # The part of grad F_T that comes from the last sums.
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

        parallel_map(work, head_groups(len(q), min(RUN, q.shape[1]), kernel), q.device)
        grad_q, grad_k, grad_v, grad_log_query, grad_log_key = gradients
        grad_decays = None
        if decay is not None:
            # grad decay_t = sum over i >= t of grad F_i: a reversed cumulative sum.
            grad_decays = (grad_log_query - grad_log_key).flip(-1).cumsum(-1).flip(-1)
            grad_decays += grad_last.unsqueeze(-1)
        return None, None, grad_q, grad_k, grad_v, grad_log_key, grad_decays, grad_s, grad_z, None, None


def _at(table: Tensor | None, at: tuple[slice, slice]) -> Tensor | None:
    return None if table is None else table[at]
