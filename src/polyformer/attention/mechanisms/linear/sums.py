"""The sums over keys that a query reads instead of the keys themselves.

    S = sum_j w_j [v_j, 1] phi(k_j)^T        [n, t] = S phi(q)        y = n / t

The 1 after each value gives the denominators by the same products as the numerators.

Weights are stored as logarithms. The sums contain e^(log weight - top), where `top` is the maximum log weight
that a query attends to, taken only over the past: it changes with the tokens, is undone exactly, and depends
neither on the future nor on padding, which has a log weight of -inf.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.attention.functional.cache_capacity import cache_capacity
from polyformer.attention.mechanisms.linear.feature_maps import Kernel


class RunWeights(NamedTuple):
    """The weights in a run of C tokens, all relative to the running maximum.

    Args:
        pairs: [N, C, C], of key j for query i, 0 for later keys.
        past: [N, C], of the keys before the run for each query.
        keys: [N, C], of each key in the sums after the run.
        kept: [N], of the keys before the run in the sums after it.
        top: [N], the maximum log weight after the run.
    """

    pairs: Tensor
    past: Tensor
    keys: Tensor
    kept: Tensor
    top: Tensor


def run_weights(weight: Tensor, decay: Tensor | None, top: Tensor) -> RunWeights:
    """Return the weights for log weights [N, C], log decays [N, C] before each token, and `top` [N].

    `top` is the past's. A decay before a token divides the weights of all keys before it. The same ratios
    result from multiplying the later keys: with F_i the sum of the decays up to i, w_ij = exp(weight_j - F_j)
    up to a factor of i.
    """
    if decay is not None:
        decays = decay.cumsum(-1)
        weight = weight - decays
    running = torch.maximum(weight.cummax(-1).values, top.unsqueeze(-1))
    finite = finite_top(running)
    last = finite[:, -1:]
    # Weights of later keys may overflow to inf before `tril_` sets them to 0.
    pairs = (weight.unsqueeze(1) - finite.unsqueeze(2)).exp_().tril_()
    past, keys = (top.unsqueeze(-1) - finite).exp_(), (weight - last).exp_()
    next_top = running[:, -1] if decay is None else running[:, -1] + decays[:, -1]
    return RunWeights(pairs, past, keys, past[:, -1], next_top)


def finite_top(top: Tensor) -> Tensor:
    """Return `top`, made finite before the first key, so that e^(-inf - top) is 0 and not NaN."""
    return top.clamp_min(torch.finfo(top.dtype).min)


def floor_denominators(total: Tensor, mass: Tensor, floor: float) -> Tensor:
    """Return denominators raised to at least `floor` * mass.

    Gradients treat raised denominators as constants. mass is the sum of the weights: the denominator if every
    phi(q) . phi(k) were 1. Features with a sign may estimate a denominator near 0, and dividing by the floor
    gives a small output instead of a huge one. Without a floor negative denominators stay unchanged: only
    denominators too small to divide by are raised.
    """
    # Far enough above the smallest normal number that dividing by it does not overflow.
    least = (mass.detach() * floor).clamp_min(torch.finfo(total.dtype).tiny ** 0.8)
    return torch.where((total if floor else total.abs()) > least, total, least)


def append_one(v: Tensor) -> Tensor:
    """Return [v, 1] for values v [..., Dv]."""
    return F.pad(v, (0, 1), value=1.0)


def divide(ratio: Tensor, mass: Tensor, floor: float) -> Tensor:
    """Return y = n / t [..., Dv] for ratio = [n, t] and mass [...]."""
    return ratio[..., :-1] / floor_denominators(ratio[..., -1], mass, floor).unsqueeze(-1)


def invert_denominators(total: Tensor, mass: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """Return 1 / denominator, and the same with zeros where the denominator was raised to its floor."""
    raised = floor_denominators(total, mass, floor)
    inverse = raised.reciprocal()
    return inverse, inverse * (raised == total)


def grad_ratio(grad: Tensor, out: Tensor, inverse: Tensor, unraised: Tensor) -> Tensor:
    """Return the gradients of [n, t], [N, C, Dv + 1], of out = n / t.

    grad n = grad / t        grad t = -(grad . out) / t
    """
    # A raised denominator is a constant, so `unraised` is 0 there.
    grad_total = (grad * out).sum(-1, keepdim=True).neg_() * unraised.unsqueeze(-1)
    return torch.cat([grad * inverse.unsqueeze(-1), grad_total], -1)


RUN = 128
"""Tokens of a run, for which a causal pass computes all pairs.

Runs of 64 and 256 are slower by up to a third, under AVX2 as under AVX-512; runs of 64 save twice the number
of sums for the backward pass.
"""

LEAST_RUN = 64
"""The minimum number of tokens of a run, for any number of features: fewer give products of vectors."""


class Sums(NamedTuple):
    """S [N, Dv + 1, M] times e^-top; top and mass [N].

    `top` is the maximum log weight so far, decayed to the present token; `mass` the sum of e^(weight - top).
    """

    table: Tensor
    top: Tensor
    mass: Tensor


def empty_sums(heads: int, width: int, kernel: Kernel) -> Sums:
    """Return the sums before the first key, for values of `width` dimensions."""
    none = kernel.directions.new_zeros(heads)
    return Sums(none.new_zeros(heads, width + 1, kernel.width), none - torch.inf, none)


class WeightedHeads(NamedTuple):
    """Queries and keys with the weights of the keys, with rows and heads in one axis N.

    q, k: [N, T, D]. v: [v, 1], [N, T, Dv + 1]. weight, decay: [N, T], the log weight of each key and the log
    decay before it; None for no decay.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    weight: Tensor
    decay: Tensor | None

    def part(self, at: tuple[slice, slice]) -> "WeightedHeads":
        """Return the rows and tokens `at`."""
        return WeightedHeads(*(None if x is None else x[at] for x in self))  # type: ignore[arg-type]


def recurrent_step(kernel: Kernel, heads: WeightedHeads, past: Sums) -> tuple[Tensor, Sums]:
    """Return the output [N, 1, Dv] of one token per row, and the next sums.

    S = e^decay S + e^weight [v, 1] phi(k)^T
    """
    q, k, v, weight, decay = heads
    (phi_q, _), (phi_k, scale) = kernel.values(q[:, 0]), kernel.features(k[:, 0])
    weight = weight[:, 0] + scale
    past_top = past.top if decay is None else past.top + decay[:, 0]
    # The sums are rescaled to the new maximum, so that no exponential exceeds 1.
    top = torch.maximum(weight, past_top).detach()
    share, kept = ((x - finite_top(top)).exp().unsqueeze(-1) for x in (weight, past_top))
    value = (v[:, 0] * share).unsqueeze(2)
    table = torch.baddbmm(past.table * kept.unsqueeze(-1), value, phi_k.unsqueeze(1))
    mass = (past.mass * kept.squeeze(-1) + share.squeeze(-1)).detach()
    out = divide(torch.bmm(table, phi_q.unsqueeze(-1)).squeeze(-1), mass, kernel.least)
    return out.unsqueeze(1), Sums(table, top, mass)


def head_groups(heads: int, length: int, kernel: Kernel) -> list[slice]:
    """Return groups of the N heads computed together: limited by the cache and shared among threads."""
    threads = 1 if kernel.directions.is_cuda else torch.get_num_threads()
    # The features of a run of all heads in a group should stay in the cache.
    fits = 2 * cache_capacity(kernel.directions) // (min(length, run_length(kernel)) * kernel.width)
    return runs(heads, max(1, min(fits, -(-heads // threads))))


def run_length(kernel: Kernel) -> int:
    """Return the number of tokens per run of features if pairs are not computed."""
    return max(LEAST_RUN, 2 * cache_capacity(kernel.directions) // kernel.width)


def runs(length: int, step: int) -> list[slice]:
    """Return slices that split `length` tokens into runs of at most `step`."""
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]
