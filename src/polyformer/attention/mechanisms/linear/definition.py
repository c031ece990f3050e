"""The equation of linear attention over all pairs, the reference for tests of the linear-time form.

    y_i = sum_j w_ij (phi(q_i) . phi(k_j)) v_j / sum_j w_ij (phi(q_i) . phi(k_j))
    w_ij = exp(weight_j + decay_(j+1) + ... + decay_i)        over the keys j that query i attends to

phi(k) = e^scale * values, so the scale of a key is added to its log weight; the scale of a query cancels.
Weights are divided by the maximum of each query, which cancels too. Cost: T^2 (M + Dv) products per head.
"""

import dataclasses

import torch
from torch import Tensor

from polyformer.attention.mechanisms.base import Heads
from polyformer.attention.mechanisms.linear.feature_maps import Kernel
from polyformer.attention.mechanisms.linear.sums import floor_denominators
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
