"""The equation of linear attention over all pairs, and the sums over keys that a query reads instead of keys.

    y_i = sum_j w_ij (phi(q_i) . phi(k_j)) v_j / sum_j w_ij (phi(q_i) . phi(k_j))        the definition
    S = sum_j w_j [v_j, 1] phi(k_j)^T        [n, t] = S phi(q)        y = n / t            the fast form

The 1 after each value gives the denominators by the same products as the numerators.

phi(k) = e^scale * values, so the scale of a key is added to its log weight; the scale of a query cancels. In
the definition weights are divided by the maximum of each query, which cancels too; it costs T^2 (M + Dv)
products per head, and is the reference for tests of the linear-time form. In the sums weights are stored as
logarithms. The sums contain e^(log weight - top), where `top` is the maximum log weight that a query attends
to, taken only over the past: it changes with the tokens, is undone exactly, and depends neither on the future
nor on padding, which has a log weight of -inf.
"""

import dataclasses
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.attention.functional.cache_capacity import cache_capacity
from polyformer.attention.mechanisms.base import Heads
from polyformer.attention.mechanisms.linear.feature_maps import Kernel
from polyformer.attention.patterns.implied import implied
from polyformer.core.ops.softmax import record
from polyformer.core.sequence.context import Context


@dataclasses.dataclass(frozen=True, eq=False)
class LinearInputs:
    """q [B, H, Tq, D], k [B, H, T, D] and v [B, H, T, Dv] of the new keys, in the precision of W.

    Args:
        weight: [B, H, T], the log weight of every key, -inf for padding.
        decay: [B, H, T], the log decay before every token; None for no decay.
        offset: the slot of the first query among these keys.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    kernel: Kernel
    weight: Tensor
    decay: Tensor | None
    causal: bool
    offset: int

    @classmethod
    def of(
        cls,
        heads: Heads,
        kernel: Kernel,
        context: Context,
        weight: Tensor | None = None,
        decay: Tensor | None = None,
    ) -> "LinearInputs":
        """Cast the inputs, repeat grouped keys and values [B, Hkv, T, D], and give padding no weight."""
        q, k, v = (x.to(kernel.directions.dtype) for x in heads)
        groups, new = q.shape[1] // k.shape[1], k.shape[2]
        if groups > 1:
            k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        if weight is None:
            weight = k.new_zeros(k.shape[:3])
        if context.kv_valid is not None:
            real = context.kv_valid[:, -new:].unsqueeze(1)
            weight = weight.masked_fill(~real, -torch.inf)
            # Padding must not decay the sums either: a log decay of 0.
            decay = None if decay is None else decay * real
        # Without causality no key is "before" a token, so decays are undefined.
        if not context.causal:
            decay = None
        # The slots of the state come before these keys.
        offset = context.offset - (context.kv_len - new)
        return cls(q, k, v, kernel, weight, decay, context.causal, offset)

    def tokens(self, own: slice) -> "LinearInputs":
        """Return the inputs restricted to some tokens of all rows, their queries and keys."""
        tables = {name: getattr(self, name)[:, :, own] for name in ("q", "k", "v", "weight")}
        decay = None if self.decay is None else self.decay[:, :, own]
        return dataclasses.replace(self, **tables, decay=decay, offset=0)

    def part(self, row: int, queries: slice, keys: slice, offset: int) -> "LinearInputs":
        """Return the inputs restricted to some queries and keys of one row."""

        def cut(x: Tensor, tokens: slice) -> Tensor:
            return x[row : row + 1, :, tokens]

        return dataclasses.replace(
            self,
            q=cut(self.q, queries),
            k=cut(self.k, keys),
            v=cut(self.v, keys),
            weight=cut(self.weight, keys),
            decay=None if self.decay is None else cut(self.decay, keys),
            offset=offset,
        )


def definition(inputs: LinearInputs, context: Context) -> Tensor:
    """Return the output [B, H, Tq, Dv]; `inputs` must have all keys of the context."""
    (phi_q, _), (phi_k, scale) = inputs.kernel.values(inputs.q), inputs.kernel.features(inputs.k)
    log_w = (inputs.weight + scale).unsqueeze(-2)  # [B, H, Tq, Tk] from here on
    if inputs.decay is not None:
        decays = inputs.decay.cumsum(-1)
        queries = slice(inputs.offset, inputs.offset + inputs.q.shape[2])
        # The decays between j and i are a difference of cumulative sums.
        log_w = log_w + decays[..., queries].unsqueeze(-1) - decays.unsqueeze(-2)
    allowed = _allowed(inputs, context)
    if allowed is not None:
        log_w = log_w.masked_fill(~allowed, -torch.inf)
    # Clamped, because a query without keys has a maximum of -inf, and -inf - -inf is NaN.
    top = log_w.detach().amax(-1, keepdim=True).clamp_min(torch.finfo(log_w.dtype).min)
    w = (log_w - top).exp()
    numerators = phi_q @ phi_k.mT * w
    denominators = numerators.sum(-1, keepdim=True)
    weights = numerators / floor_denominators(denominators, w.sum(-1, keepdim=True), inputs.kernel.least)
    record(weights)
    return weights @ inputs.v


def _allowed(inputs: LinearInputs, context: Context) -> Tensor | None:
    """Return the attention mask of the context, [B or 1, 1, Tq, Tk]; None if all keys are allowed."""
    limits = implied(context)
    if limits is None:
        return None
    b = torch.arange(len(inputs.q), device=inputs.q.device).view(-1, 1, 1, 1)
    query, key = (torch.arange(n, device=b.device) for n in (context.q_len, context.kv_len))
    return limits.mask(context, b, torch.zeros_like(b), query.unsqueeze(1), key)


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
