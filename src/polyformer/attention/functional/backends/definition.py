"""Attention directly from its equation: the reference in the tests of every other backend.

    softmax(score_mod(Q K^T * scale + relative terms), over the keys that the pattern allows) V

float16 and bfloat16 inputs are computed in float32, as in the fused kernels.
"""

import torch
from torch import Tensor

from polyformer.attention.functional.request import Request, indices
from polyformer.core.ops.dropout import dropout
from polyformer.core.ops.softmax import softmax


def refuses(request: Request) -> str | None:
    """Return None: this backend runs every request."""
    return None


def run(request: Request) -> tuple[Tensor, Tensor]:
    """Return output [B, H, Tq, Dv] and log-sum-exp [B, H, Tq]; time and memory are Tq x Tk."""
    half = request.q.dtype in (torch.float16, torch.bfloat16)
    q, k, v = (x.float() if half else x for x in (request.q, request.k, request.v))
    # Grouped queries: `groups` neighbouring query heads share a key head.
    k, v = (x.repeat_interleave(request.groups, dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * request.scale  # [B, H, Tq, Tk]
    b, h, q_idx, kv_idx = indices(request)
    relative = None if request.relative is None else request.relative.to(q.dtype)
    if relative is not None:
        add = relative.score_mod(q, k, request.scale, request.context)
        scores = add(scores, b, h, q_idx, kv_idx)
    if request.score_mod is not None:
        scores = request.score_mod(scores, b, h, q_idx, kv_idx).expand(scores.shape)
    # The mask comes last, so that no score_mod can make a masked pair visible.
    allowed = None
    if request.pattern is not None:
        allowed = request.pattern.mask(request.context, b, h, q_idx, kv_idx)
    probabilities, lse = softmax(scores, allowed)
    kept = dropout(probabilities, request.dropout)
    out = kept @ v
    if relative is not None and relative.position_values is not None:
        out = out + relative.values_term(kept, request.context)
    return out.to(request.q.dtype), lse
