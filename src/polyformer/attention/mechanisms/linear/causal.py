"""Causal linear attention in one sweep over runs of tokens, forward and backward.

The sums S = sum_j w_j [v_j, 1] phi(k_j)^T pass from run to run; inside a run all pairs are computed
explicitly. No features are saved: they are computed run by run, in a processor's cache, and recomputed in the
backward pass, which saves only inputs, output and the sums before each run. Heads are distributed over a
CPU's threads. `recurrence.scan` computes the same under autograd: with saved features in 4 to 6 times the
memory, with recomputed features in 1.15 to 1.4 times the time.

With u = phi(q) and f = phi(k) without their scales, v the values with their 1, S the sums before the run, and
weights relative to the running maximum (`sums.py`): w_ij of the pairs, a_i of the past, b_j of the keys in
the next sums, c of the past in the next sums, the queries i and keys j of a run give

    s_ij = w_ij (u_i . f_j)                                    scores
    [n_i, t_i] = sum_j s_ij v_j + a_i S u_i                    numerators, denominators
    y_i = n_i / t_i
    S' = sum_j b_j v_j f_j^T + c S

The gradients follow from g_i = grad [n_i, t_i] of the run, and grad S' of the next sums:

    grad s_ij = g_i . v_j                                      of the scores
    p_ij      = w_ij grad s_ij                                 of the products u_i . f_j
    grad u_i  = sum_j p_ij f_j + a_i S^T g_i
    grad f_j  = sum_i p_ij u_i + b_j grad S'^T v_j
    grad v_j  = sum_i s_ij g_i + b_j grad S' f_j
    grad S    = sum_i a_i g_i u_i^T + c grad S'

Log weights. Every contribution of key j is proportional to e^(weight_j) f_j, so by Euler's theorem

    grad weight_j = f_j . grad f_j                             and the same for the scale of phi(k_j)

Decays. With F_i the sum of the decays up to token i, w_ij = exp(weight_j - F_j + F_i), and the sums after the
last token T contain e^(F_T - F_j). So

    grad F_i     = u_i . grad u_i - f_i . grad f_i,    and for i = T also <grad S_T, S_T>
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
    WeightedHeads,
    grad_ratio,
    head_groups,
    invert_denominators,
    run_weights,
    runs,
)
from polyformer.core.ops.autograd import autocast_disabled, first_order
from polyformer.core.ops.batched_products import product
from polyformer.core.ops.cpu import parallel_map


class Run:
    """A run of C tokens of N heads: their features, the weights of its keys, and the scores of its pairs."""

    def __init__(self, kernel: Kernel, heads: WeightedHeads, top: Tensor):
        self.kernel, self.q, self.k, self.v = kernel, heads.q, heads.k, heads.v
        (self.phi_q, _), (self.phi_k, scale) = kernel.values(heads.q), kernel.features(heads.k)
        # The scale of a key is part of its weight; the scale of a query cancels.
        self.weights = run_weights(heads.weight + scale, heads.decay, top)
        self.scores = product(self.phi_q, self.phi_k.mT).mul_(self.weights.pairs)


def run_forward(run: Run, past: Sums) -> tuple[Tensor, Tensor, Tensor, Sums]:
    """Return the output [N, C, Dv], the results of `invert_denominators`, and the next sums."""
    w = run.weights
    ratio = product(run.scores, run.v)
    ratio.addcmul_(product(run.phi_q, past.table.mT), w.past.unsqueeze(-1))
    # The denominators if every u . f were 1, for their lower bound.
    mass = w.pairs.sum(-1).addcmul_(past.mass.unsqueeze(-1), w.past)
    inverse, unraised = invert_denominators(ratio[..., -1], mass, run.kernel.least)
    weighted_v = (run.v * w.keys.unsqueeze(-1)).mT.contiguous()
    table = product(weighted_v, run.phi_k).add_(past.table * w.kept.view(-1, 1, 1))
    out = ratio[..., :-1] * inverse.unsqueeze(-1)
    return out, inverse, unraised, Sums(table, w.top, mass[:, -1])


class RunGradients(NamedTuple):
    """The gradients of q, k, v, and u . grad u [N, C], f . grad f [N, C] of every query and key."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_query: Tensor
    log_key: Tensor


def run_backward(run: Run, grad: Tensor, past: Tensor, grad_next: Tensor) -> tuple[RunGradients, Tensor]:
    """Return the gradients of a run's inputs, and grad S of the sums before it.

    Args:
        run: the run, recomputed from its inputs.
        grad: grad [n, t], [N, C, Dv + 1].
        past: S before the run.
        grad_next: grad S' after the run.
    """
    w = run.weights
    grad_past, key_share = grad * w.past.unsqueeze(-1), w.keys.unsqueeze(-1)
    # p_ij = w_ij (g_i . v_j)
    grad_pairs = product(grad, run.v.mT).mul_(w.pairs)
    # grad u_i: over the keys of the run, then over the sums of the past.
    grad_phi_q = product(grad_pairs, run.phi_k).add_(product(grad_past, past))
    # grad f_j: over the queries of the run, then through the next sums.
    grad_phi_k = product(grad_pairs.mT.contiguous(), run.phi_q)
    grad_phi_k.add_(product(run.v * key_share, grad_next))
    # grad v_j, over the same two paths.
    grad_v = product(run.scores.mT.contiguous(), grad)
    grad_v.addcmul_(product(run.phi_k, grad_next.mT), key_share)
    grad_log_query = (run.phi_q * grad_phi_q).sum(-1)
    grad_log_key = (run.phi_k * grad_phi_k).sum(-1)
    # grad S of the sums before the run.
    grad_s = product(grad_past.mT.contiguous(), run.phi_q).add_(grad_next * w.kept.view(-1, 1, 1))
    gradients = RunGradients(
        run.kernel.backward(run.q, run.phi_q, grad_phi_q, None),
        run.kernel.backward(run.k, run.phi_k, grad_phi_k, grad_log_key),
        grad_v,
        grad_log_query,
        grad_log_key,
    )
    return gradients, grad_s


class CausalAttention(torch.autograd.Function):
    """The tensors of `WeightedHeads`, the tensors of the past `Sums` -> out [N, T, Dv], sums."""

    @staticmethod
    @autocast_disabled
    def forward(ctx: Any, kernel: Kernel, graph: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Compute the runs from the first to the last.

        graph: whether the sums before each run are saved for the backward pass. tensors: one by one, because
        autograd follows no tensors inside of other values.
        """
        inputs, past = WeightedHeads(*tensors[:5]), tensors[5:]
        q, _, v, weight, _ = inputs
        steps = runs(q.shape[1], RUN)
        out = v.new_empty(*v.shape[:2], v.shape[2] - 1)
        inverse, unraised = torch.empty_like(weight), torch.empty_like(weight)
        # Cloned, because the sums are updated in place.
        after = Sums(*(x.clone() for x in past))
        before = tuple(x.new_empty(len(steps) if graph else 0, *x.shape) for x in after[:2])

        def work(groups: Sequence[slice]) -> None:
            for heads in groups:
                sums = Sums(*(x[heads] for x in after))
                for number, step in enumerate(steps):
                    if graph:
                        for table, value in zip(before, sums):
                            table[number, heads] = value
                    at = heads, step
                    run = Run(kernel, inputs.part(at), sums.top)
                    out[at], inverse[at], unraised[at], sums = run_forward(run, sums)
                for table, value in zip(after, sums):
                    table[heads] = value

        parallel_map(work, head_groups(len(q), min(RUN, q.shape[1]), kernel), q.device)
        ctx.kernel = kernel
        ctx.save_for_backward(*inputs, out, inverse, unraised, *before, after.table)
        # top and mass only rescale: gradients treat them as constants.
        ctx.mark_non_differentiable(after.top, after.mass)
        ctx.set_materialize_grads(False)
        return (out, *after)

    @staticmethod
    @first_order("attention by features, run by run,")
    @autocast_disabled
    def backward(ctx: Any, grad: Tensor | None, *grad_sums: Tensor | None) -> tuple[Tensor | None, ...]:
        """Compute the runs in reverse with `run_backward`, passing on the gradients of the sums."""
        *tensors, out, inverse, unraised, sums, top, last = ctx.saved_tensors
        inputs = WeightedHeads(*tensors)
        q, k, v, weight, decay = inputs
        kernel, steps, grad_s = ctx.kernel, runs(q.shape[1], RUN), grad_sums[0]
        grad = torch.zeros_like(out) if grad is None else grad
        grad_s = torch.zeros_like(last) if grad_s is None else grad_s.clone()
        # The part of grad F_T that comes from the last sums.
        grad_last = (grad_s * last).sum((1, 2))
        gradients = tuple(torch.empty_like(x) for x in (q, k, v, weight, weight))

        def work(groups: Sequence[slice]) -> None:
            for heads in groups:
                grad_next = grad_s[heads]
                for number, step in reversed(list(enumerate(steps))):
                    at = heads, step
                    run = Run(kernel, inputs.part(at), top[number, heads])
                    ratio = grad_ratio(grad[at], out[at], inverse[at], unraised[at])
                    grad_run, grad_next = run_backward(run, ratio, sums[number, heads], grad_next)
                    for table, value in zip(gradients, grad_run):
                        table[at] = value
                grad_s[heads] = grad_next

        parallel_map(work, head_groups(len(q), min(RUN, q.shape[1]), kernel), q.device)
        grad_q, grad_k, grad_v, grad_log_query, grad_log_key = gradients
        grad_decays = None
        if decay is not None:
            # grad decay_t = sum over i >= t of grad F_i: a reversed cumulative sum.
            grad_decays = (grad_log_query - grad_log_key).flip(-1).cumsum(-1).flip(-1)
            grad_decays += grad_last.unsqueeze(-1)
        return None, None, grad_q, grad_k, grad_v, grad_log_key, grad_decays, grad_s, None, None
