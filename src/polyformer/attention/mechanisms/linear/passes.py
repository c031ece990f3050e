"""Linear attention forward and backward: over all keys, causally in one sweep, and document by document.

Features are computed in runs of tokens, in a processor's cache, and recomputed in the backward pass. With
u = phi(q) and f = phi(k) without their scales, every query attending to every key (`NoncausalAttention`) is

    S = sum_j b_j [v_j, 1] f_j^T        [n_i, t_i] = S u_i        y_i = n_i / t_i

with b_j = exp(weight_j + scale_j - top). Backward, from g_i = grad [n_i, t_i] (see `sums.grad_ratio`):

    grad u_i = S^T g_i                    grad S = sum_i g_i u_i^T
    grad f_j = b_j grad S^T [v_j, 1]
    grad [v_j, 1] = b_j grad S f_j
    grad weight_j = [v_j, 1] . grad [v_j, 1]         (Euler: every contribution of key j is linear in both)

Causally (`CausalAttention`), the sums S = sum_j w_j [v_j, 1] phi(k_j)^T pass from run to run; inside a run
all pairs are computed explicitly. The forward pass saves only inputs, output and the sums before each run.
Heads are distributed over a CPU's threads.

Which form runs (`attend_document`): `sums.recurrent_step` for a single causal token, `CausalAttention` for
other causal calls, `NoncausalAttention` without causality; `sums.definition` for recorded weights and the
backend "definition". None replaces another. On one core, `CausalAttention` takes 1.5 times as long as the
step for a token of one text, and 1.1 to 1.2 times for eight texts. The sums under autograd
(`context_parallel.document_sums`) take 1.3 times as long as `NoncausalAttention` in training at 512 tokens
and 2.2 times at 4,096, or 1.8 and 2.8 times with activation checkpointing (2026-11-30, float32, 256
features). `recurrence.scan` computes the causal form under autograd: with saved features in 4 to 6 times the
memory, with recomputed features in 1.15 to 1.4 times the time.

With v the values with their 1, S the sums before the run, and weights relative to the running maximum: w_ij
of the pairs, a_i of the past, b_j of the keys in the next sums, c of the past in the next sums, the queries i
and keys j of a run give

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
    LinearInputs,
    Sums,
    WeightedHeads,
    append_one,
    empty_sums,
    finite_top,
    grad_ratio,
    head_groups,
    invert_denominators,
    recurrent_step,
    run_length,
    run_weights,
    runs,
)
from polyformer.core.host_values import on_host
from polyformer.core.ops.autograd import autocast_disabled, first_order
from polyformer.core.ops.cpu import parallel_map
from polyformer.core.ops.product_kernels import product


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


def attend_document(inputs: LinearInputs, past: Sums) -> tuple[Tensor, Sums]:
    """Return output [B, H, Tq, Dv] and the next sums, for one document per row after the sums `past`."""
    rows, heads, queries = inputs.q.shape[:3]
    last = inputs.offset + queries
    keep = slice(0, last) if inputs.causal else slice(None)
    k, v, weight = (x[:, :, keep].flatten(0, 1) for x in (inputs.k, append_one(inputs.v), inputs.weight))
    decay = None if inputs.decay is None else inputs.decay[:, :, keep].flatten(0, 1)
    q = inputs.q.flatten(0, 1)
    if not inputs.causal:
        out = NoncausalAttention.apply(inputs.kernel, q, k, v, weight)
    elif queries == last == 1:
        out, past = recurrent_step(inputs.kernel, WeightedHeads(q, k, v, weight, decay), past)
    else:
        # Keys before the first query get queries of zeros, so that both have the same length; their outputs
        # are dropped.
        q = torch.nn.functional.pad(q, (0, 0, inputs.offset, 0))
        graph = torch.is_grad_enabled()
        tensors = *WeightedHeads(q, k, v, weight, decay), *past
        out, *after = CausalAttention.apply(inputs.kernel, graph, *tensors)
        out, past = out[:, inputs.offset :], Sums(*after)
    return out.unflatten(0, (rows, heads)), past


def attend_causal_documents(
    inputs: LinearInputs, documents: Tensor, before: int, past: Sums
) -> tuple[Tensor, Sums]:
    """Return the output of queries that attend only to their own document, and the next sums.

    documents: [B, before + T], of all keys; `before` of them are in the past. The sums `past` are used in
    rows that start with the document of the last past key.
    """
    rows, heads, queries = inputs.q.shape[:3]
    continues = documents.new_ones(rows, dtype=torch.bool)
    if before:
        continues = documents[:, before - 1] == documents[:, before]
    width = inputs.v.shape[3]
    fresh = empty_sums(rows * heads, width, inputs.kernel)
    same = continues.repeat_interleave(heads)
    # Rows that start with a new document start with empty sums.
    past = Sums(*(torch.where(same.view(-1, *[1] * (x.dim() - 1)), x, y) for x, y in zip(past, fresh)))
    if inputs.k.shape[2] == 1:
        return attend_document(inputs, past)
    row_outputs, row_sums = [], []
    for row, numbers in enumerate(on_host(documents)[:, before:].tolist()):
        sums = Sums(*(x[row * heads : (row + 1) * heads] for x in past))
        outputs = []
        for index, (start, stop) in enumerate(spans(numbers)):
            first, last = (min(max(edge - inputs.offset, 0), queries) for edge in (start, stop))
            if first == last:
                continue
            offset = max(inputs.offset - start, 0)
            # Only the first document of a row continues the past.
            if index:
                sums = empty_sums(heads, width, inputs.kernel)
            part = inputs.part(row, slice(first, last), slice(start, stop), offset)
            out, sums = attend_document(part, sums)
            outputs.append(out)
        row_outputs.append(torch.cat(outputs, 2))
        row_sums.append(sums)
    return torch.cat(row_outputs), Sums(*(torch.cat(x) for x in zip(*row_sums)))


def attend_noncausal_documents(inputs: LinearInputs, q_doc: Tensor, kv_doc: Tensor, past: Sums) -> Tensor:
    """Return the output of queries that attend to their whole document: q_doc [B, Tq], kv_doc [B, T]."""
    outputs = []
    for row, (of_queries, of_keys) in enumerate(zip(on_host(q_doc).tolist(), on_host(kv_doc).tolist())):
        keys = {of_keys[start]: slice(start, stop) for start, stop in spans(of_keys)}
        parts = [
            inputs.part(row, slice(start, stop), keys.get(of_queries[start], slice(0, 0)), 0)
            for start, stop in spans(of_queries)
        ]
        outputs.append(torch.cat([attend_document(part, past)[0] for part in parts], 2))
    return torch.cat(outputs)


def spans(numbers: list[int]) -> list[tuple[int, int]]:
    """Return the start and stop of each run of equal numbers."""
    edges = [i for i in range(1, len(numbers)) if numbers[i] != numbers[i - 1]]
    return list(zip([0, *edges], [*edges, len(numbers)]))
