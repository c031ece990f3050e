"""Calls that repeat, such as those of every layer in a step of decoding: looked into once, then recalled.

Without gradients, calls of one context whose patterns, scales, shapes and types are equal differ in q, k and
v alone. Where torch's fused kernel does the first of them, the others run its plan at once.
"""

from collections.abc import Hashable

import torch
from torch import Tensor

from polyformer.dot_product.backends import sdpa
from polyformer.dot_product.isolation import is_finite, is_readable
from polyformer.dot_product.observed import observing
from polyformer.dot_product.relative import Relative
from polyformer.dot_product.request import Request, is_autocast, is_traced, transformed
from polyformer.ops.softmax import recording
from polyformer.patterns.base import MaskMod, Pattern, ScoreMod
from polyformer.sequence.context import Context


def recall_key(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | MaskMod | None,
    mask_mod: MaskMod | None,
    score_mod: ScoreMod | None,
    relative: Relative | None,
    context: Context | None,
    scale: float | None,
    dropout: float,
    backend: str,
    return_lse: bool,
) -> Hashable | None:
    """Under what its context keeps the plan of a call; None for a call that asks for more than a pattern and
    relative terms, without a context or with a share of one, where autograd, a tracer or someone who records
    weights or observes calls follows it, and where its pattern may say something else in the next call."""
    if context is None or context.share is not None or mask_mod is not None or score_mod is not None:
        return None
    if dropout or backend != "auto" or return_lse:
        return None
    if not (pattern is None or (isinstance(pattern, Pattern) and pattern.is_static())):
        return None
    if torch.is_grad_enabled() or is_traced() or transformed() or is_autocast(q.device.type):
        return None
    if recording() or observing():
        return None
    return "plan", pattern, relative, scale, q.shape, k.shape, v.shape, q.dtype, q.device


def recall(context: Context | None, key: Hashable, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
    """The output [B, H, Tq, Dv], or None: nothing is kept, or NaN or infinity must be kept apart."""
    assert context is not None, "without a context there is no key"
    plan: sdpa.Plan | None = context.recalled().get(key)
    if plan is None:
        return None
    out = plan(q, k, v)
    return out if not (plan.hides and is_readable(out)) or is_finite(out) else None


def remember(key: Hashable, request: Request) -> sdpa.Plan:
    """The plan of torch's fused kernel for a call, kept for those that follow."""
    memo = request.context.recalled()
    if key not in memo:
        memo[key] = sdpa.plan(request)
    return memo[key]
