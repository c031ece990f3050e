"""The equation of linear attention over all pairs, the reference for tests of the linear-time form.

    y_i = sum_j w_ij (phi(q_i) . phi(k_j)) v_j / sum_j w_ij (phi(q_i) . phi(k_j))
    w_ij = exp(weight_j + decay_(j+1) + ... + decay_i)        over the keys j that query i attends to

phi(k) = e^scale * values, so the scale of a key is added to its log weight; the scale of a query cancels.
Weights are divided by the maximum of each query, which cancels too. Cost: T^2 (M + Dv) products per head.
"""

import torch
from torch import Tensor

from polyformer.attention.mechanisms.linear.inputs import LinearInputs
from polyformer.attention.mechanisms.linear.weights import floor_denominators
from polyformer.attention.patterns.implied import implied
from polyformer.core.ops.softmax import record
from polyformer.core.sequence.context import Context


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
