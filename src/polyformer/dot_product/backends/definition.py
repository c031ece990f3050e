"""Attention as the equation says it: the oracle that every other backend is tested against.

    softmax(score_mod(Q K^T * scale + relative terms), over the keys that the pattern allows) V

float16 and bfloat16 are computed in float32, as the fused kernels do.
"""

import torch
from torch import Tensor

from polyformer.dot_product.request import Request, indices
from polyformer.ops.dropout import dropout
from polyformer.ops.softmax import softmax


def refuses(request: Request, return_lse: bool) -> str | None:
    """Why this backend cannot take the request; it takes all."""
    return None


def run(request: Request) -> tuple[Tensor, Tensor]:
    """Output [B, H, Tq, Dv] and log-sum-exp [B, H, Tq]; dense: time and memory Tq x Tk."""
    half = request.q.dtype in (torch.float16, torch.bfloat16)
    q, k, v = (x.float() if half else x for x in (request.q, request.k, request.v))
    k, v = (x.repeat_interleave(request.groups, dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * request.scale  # [B, H, Tq, Tk]
    b, h, q_idx, kv_idx = indices(request)
    relative = None if request.relative is None else request.relative.to(q.dtype)
    if relative is not None:
        add = relative.score_mod(q, k, request.scale, request.context)
        scores = add(scores, b, h, q_idx, kv_idx)
    if request.score_mod is not None:
        scores = request.score_mod(scores, b, h, q_idx, kv_idx).expand(scores.shape)
    allowed = None
    if request.pattern is not None:
        allowed = request.pattern.mask(request.context, b, h, q_idx, kv_idx)
    probabilities, lse = softmax(scores, allowed)
    kept = dropout(probabilities, request.dropout)
    out = kept @ v
    if relative is not None and relative.position_values is not None:
        out = out + relative.values_term(kept, request.context)
    return out.to(request.q.dtype), lse
