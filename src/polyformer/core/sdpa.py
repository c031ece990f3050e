"""torch's fused attention, for what it can do exactly: no score_mod, and a mask that is short or none."""

import torch.nn.functional as F
from torch import Tensor

from polyformer.core.layout import count
from polyformer.core.patterns import Causal, Full
from polyformer.core.request import Request, indices

MASK_LIMIT = 1 << 22
"""Entries of the boolean mask that may be built: one of 4 MiB; longer inputs belong to `blocks` or `flex`."""

SPARSE_FROM = 1 << 18
"""Pairs of query and key from which it pays to skip the keys that a sparse pattern does not need."""

DENSE_LIMIT = 1 << 26
"""Scores that torch may hold at once where its fused kernels do not apply and it computes densely."""


def refuses(request: Request, return_lse: bool) -> str | None:
    """Why this backend cannot take the request, or None."""
    if request.score_mod is not None:
        return "a score_mod changes the scores"
    if return_lse:
        return "torch's function does not return the log-sum-exp"
    batch, heads, queries, width = request.q.shape
    pairs = queries * request.context.kv_len
    if batch * heads * pairs == 0:
        return "there is nothing to attend to"
    unfused = width != request.v.shape[3] or (request.dropout > 0 and request.q.device.type == "cpu")
    if unfused and batch * heads * pairs > DENSE_LIMIT:
        return "torch has no fused kernel for this dropout or width and would compute all scores at once"
    if _plain(request) is not None:
        return None
    if batch * pairs > MASK_LIMIT:
        return f"its mask would have more than {MASK_LIMIT} entries"
    if pairs >= SPARSE_FROM and (share := _share(request)) < 0.5:
        return f"it would compute every pair and the pattern needs {share:.0%} of them"
    return None


def run(request: Request) -> tuple[Tensor, None]:
    """Output [B, H, Tq, Dv]."""
    plain = _plain(request)
    mask = empty = None
    if plain is None:
        mask, empty = _mask(request)
    out = F.scaled_dot_product_attention(
        request.q, request.k, request.v, attn_mask=mask, dropout_p=request.dropout,
        is_causal=plain == "causal", scale=request.scale, enable_gqa=request.groups > 1,
    )  # fmt: skip
    return (out if empty is None else out.masked_fill(empty, 0.0)), None


def _mask(request: Request) -> tuple[Tensor, Tensor]:
    """The mask, and the rows that see nothing; kept with the context, since all layers ask for the same.

    A row that sees nothing is given every key and its output is set to zero: the kernels differ in what
    they make of such a row, forward and backward.
    """
    assert request.pattern is not None, "everything is allowed: no mask is needed"
    key = ("mask", request.pattern, request.q.device)
    if key not in request.context.memo:
        mask = request.pattern.mask(request.context, *indices(request))
        mask = mask.view(*[1] * (4 - mask.dim()), *mask.shape)
        empty = ~mask.any(-1, keepdim=True)
        request.context.memo[key] = mask | empty, empty
    return request.context.memo[key]


def _share(request: Request) -> float:
    """The share of all pairs that the layout names."""
    assert request.pattern is not None, "everything is allowed"
    key = ("share", request.pattern)
    if key not in request.context.memo:
        rows = request.pattern.layout(request.context, 128)
        needed = sum((row.stop - row.start) * count(row.keys.some) for row in rows)
        request.context.memo[key] = needed / (request.context.q_len * request.context.kv_len)
    return request.context.memo[key]


def _plain(request: Request) -> str | None:
    """ "full" or "causal" when no mask is needed, else None.

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
