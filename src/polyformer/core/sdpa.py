"""torch's fused attention, for what it can do exactly: no score_mod, and a mask that is short or none."""

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.core.context import Context
from polyformer.core.layout import count
from polyformer.core.pattern import Pattern
from polyformer.core.patterns import Causal, Full
from polyformer.core.request import Request, indices

MASK_LIMIT = 1 << 22
"""Entries of the boolean mask that may be built: one of 4 MiB; longer inputs belong to `blocks` or `flex`."""

SPARSE_FROM = 1 << 23
"""Multiplications of q k^T from which it pays to skip the keys that a sparse pattern does not need."""

DENSE_LIMIT = 1 << 26
"""Scores that torch may hold at once where its fused kernels do not apply and it computes densely."""


def refuses(request: Request, return_lse: bool) -> str | None:
    """Why this backend cannot take the request, or None."""
    if request.score_mod is not None or request.relative is not None:
        return "a score_mod or relative terms change the scores"
    if return_lse:
        return "torch's function does not return the log-sum-exp"
    batch, heads, queries, width = request.q.shape
    pairs = queries * request.context.kv_len
    if batch * heads * pairs == 0:
        return "there is nothing to attend to"
    unfused = width != request.v.shape[3] or (request.dropout > 0 and request.q.device.type == "cpu")
    if unfused and batch * heads * pairs > DENSE_LIMIT:
        return "torch has no fused kernel for this dropout or width and would compute all scores at once"
    if (pattern := request.pattern) is None or _plain(request) is not None:
        return None
    if batch * pairs > MASK_LIMIT:
        return f"its mask would have more than {MASK_LIMIT} entries"
    if (
        batch * heads * pairs * width >= SPARSE_FROM and not torch.compiler.is_compiling()
    ):  # tracing cannot read a layout's tensors
        share = request.context.once(("share", pattern), lambda: _share(pattern, request.context))
        if share < 0.5:
            return f"it would compute every pair and the pattern needs {share:.0%} of them"
    return None


def run(request: Request) -> tuple[Tensor, None]:
    """Output [B, H, Tq, Dv]."""
    plain = _plain(request)
    mask = empty = None
    if plain is None:
        pattern = request.pattern
        assert pattern is not None, "everything is allowed: no mask is needed"
        mask, empty = request.context.once(
            ("mask", pattern, request.q.device), lambda: _mask(pattern, request)
        )
    out = F.scaled_dot_product_attention(
        request.q, request.k, request.v, attn_mask=mask, dropout_p=request.dropout,
        is_causal=plain == "causal", scale=request.scale, enable_gqa=request.groups > 1,
    )  # fmt: skip
    return (out if empty is None else out.masked_fill(empty, 0.0)), None


def _mask(pattern: Pattern, request: Request) -> tuple[Tensor, Tensor]:
    """The mask, and the rows that see nothing.

    A row that sees nothing is given every key and its output is set to zero: the kernels differ in what
    they make of such a row, forward and backward.
    """
    mask = pattern.mask(request.context, *indices(request))
    mask = mask.view(*[1] * (4 - mask.dim()), *mask.shape)
    empty = ~mask.any(-1, keepdim=True)
    return mask | empty, empty


def _share(pattern: Pattern, context: Context) -> float:
    """The share of all pairs of query and key that the layout names."""
    rows = pattern.layout(context, 128)
    needed = sum((row.stop - row.start) * count(row.keys.some) for row in rows)
    return needed / (context.q_len * context.kv_len)


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
