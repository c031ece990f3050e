"""Weights of keys in sums of features: relative to a running maximum, with a lower bound of denominators.

Weights are stored as logarithms. The sums contain e^(log weight - top), where `top` is the maximum log weight
that a query attends to, taken only over the past: it changes with the tokens, is undone exactly, and depends
neither on the future nor on padding, which has a log weight of -inf.
"""

from typing import NamedTuple

import torch
from torch import Tensor


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


def invert_denominators(total: Tensor, mass: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """Return 1 / denominator, and the same with zeros where the denominator was raised to its floor."""
    raised = floor_denominators(total, mass, floor)
    inverse = raised.reciprocal()
    return inverse, inverse * (raised == total)


def grad_ratio(grad: Tensor, out: Tensor, inverse: Tensor, unraised: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of numerators [N, C, Dv] and denominators [N, C] of out = numerator / denominator.

    grad_numerator = grad / denominator        grad_denominator = -(grad . out) / denominator
    """
    # A raised denominator is a constant, so `unraised` is 0 there.
    return grad * inverse.unsqueeze(-1), -(grad * out).sum(-1) * unraised
