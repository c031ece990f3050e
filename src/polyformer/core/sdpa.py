"""torch's fused attention, for what it can do exactly: no score_mod, and a mask that is short or none."""

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.core.patterns import Causal, Full
from polyformer.core.request import Request, indices

MASK_LIMIT = 1 << 22
"""Entries of the boolean mask that may be built: one of 4 MiB; longer inputs belong to `blocks` or `flex`."""


def refuses(request: Request, return_lse: bool) -> str | None:
    """Why this backend cannot take the request, or None."""
    if request.score_mod is not None:
        return "a score_mod changes the scores"
    if return_lse:
        return "torch's function does not return the log-sum-exp"
    if _plain(request) is None and request.q.shape[0] * request.context.q_len * request.context.kv_len > MASK_LIMIT:
        return f"its mask would have more than {MASK_LIMIT} entries"
    return None


def run(request: Request) -> tuple[Tensor, None]:
    """Output [B, H, Tq, Dv]."""
    plain = _plain(request)
    mask = None
    if plain is None:
        assert request.pattern is not None
        mask = request.pattern.allows(request.context, *indices(request))
        mask = mask.expand(*torch.broadcast_shapes(mask.shape, (1, 1, request.context.q_len, 1)))
    out = F.scaled_dot_product_attention(
        request.q, request.k, request.v, attn_mask=mask, dropout_p=request.dropout,
        is_causal=plain == "causal", scale=request.scale, enable_gqa=request.groups > 1,
    )  # fmt: skip
    if mask is not None:  # a row that sees nothing: zeros, whatever the kernel made of it
        out = out.masked_fill(~mask.any(-1, keepdim=True), 0.0)
    return out, None


def _plain(request: Request) -> str | None:
    """"full" or "causal" when no mask is needed, else None.

    SDPA aligns `is_causal` at the top left, ours at the bottom right: they agree when no keys come before
    the first query. One query that is the last key's own sees everything.
    """
    context, pattern = request.context, request.pattern
    if pattern is None or isinstance(pattern, Full):
        return "full"
    if isinstance(pattern, Causal):
        if context.q_len == 1 and context.offset >= context.kv_len - 1:
            return "full"
        if context.offset == 0 and context.q_len == context.kv_len:
            return "causal"
    return None
