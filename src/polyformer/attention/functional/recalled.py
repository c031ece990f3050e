"""A cache of plans for repeated calls, such as the calls of all layers in a step of decoding.

Without gradients, calls of the same context with equal patterns, scales, shapes and types differ only in q, k
and v. If torch's fused kernel computes the first of these calls, the others reuse its plan directly.
"""

from collections.abc import Hashable

import torch
from torch import Tensor

from polyformer.attention.functional.backends import sdpa
from polyformer.attention.functional.call import Call
from polyformer.attention.functional.isolation import is_finite, is_readable, without_padding_keys
from polyformer.attention.functional.request import Request, is_traced, observing, transformed
from polyformer.attention.patterns.base import Pattern
from polyformer.core.ops.precision import is_autocast
from polyformer.core.ops.softmax import recording


def recall_key(call: Call) -> Hashable | None:
    """Return the key under which the context stores the plan of a call, or None if it cannot be reused.

    A plan can be reused if the call has a context, is not spread over processes, and has no other options
    than a static pattern, relative terms and a scale. Autograd, tracers, autocast, recording of weights and
    observation of calls prevent the reuse.
    """
    q, k, v, pattern, mask_mod, _, score_mod, relative, context, scale, dropout, backend, return_lse = call
    if context is None or context.shard is not None or mask_mod is not None or score_mod is not None:
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


def recall(call: Call, key: Hashable) -> Tensor | None:
    """Return the output [B, H, Tq, Dv], or None if no plan is stored or NaN or infinity must be isolated."""
    assert call.context is not None, "without a context there is no key"
    plan: sdpa.Plan | None = call.context.recalled().get(key)
    if plan is None:
        return None
    k, v = without_padding_keys(call.k, call.v, call.context) if plan.hides else (call.k, call.v)
    out = plan(call.q, k, v)
    return out if not (plan.hides and is_readable(out)) or is_finite(out) else None


def remember(request: Request) -> sdpa.Plan:
    """Return the plan of torch's fused kernel for a call, and store it for the following calls."""
    memo = request.context.recalled()
    if request.key not in memo:
        memo[request.key] = sdpa.plan(request)
    return memo[request.key]
