"""`attend`: softmax attention over any pattern and any score function, through one of several backends."""

import logging
from collections.abc import Callable, Hashable
from typing import Literal, overload

import torch
from torch import Tensor

from polyformer.dot_product.isolation import run_isolated
from polyformer.dot_product.observed import observe
from polyformer.dot_product.plan import Leaf, plan
from polyformer.dot_product.recalled import recall, recall_key, remember
from polyformer.dot_product.relative import Relative
from polyformer.dot_product.request import Request, is_autocast, prepare
from polyformer.ops.precision import autocast_device
from polyformer.patterns.base import MaskMod, Pattern, ScoreMod, Where
from polyformer.sequence.context import Context

log = logging.getLogger(__name__)

Run = Callable[[Request], tuple[Tensor, Tensor | None]]


@overload
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pattern: Pattern | MaskMod | None = ...,
    mask_mod: MaskMod | None = ...,
    layout: Where | None = ...,
    score_mod: ScoreMod | None = ...,
    relative: Relative | None = ...,
    context: Context | None = ...,
    scale: float | None = ...,
    dropout: float = ...,
    backend: str = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pattern: Pattern | MaskMod | None = ...,
    mask_mod: MaskMod | None = ...,
    layout: Where | None = ...,
    score_mod: ScoreMod | None = ...,
    relative: Relative | None = ...,
    context: Context | None = ...,
    scale: float | None = ...,
    dropout: float = ...,
    backend: str = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def attend(
    q,
    k,
    v,
    *,
    pattern=None,
    mask_mod=None,
    layout=None,
    score_mod=None,
    relative=None,
    context=None,
    scale=None,
    dropout=0.0,
    backend="auto",
    return_lse=False,
):
    """softmax(score_mod(q k^T * scale)) v over the keys that the pattern and the context allow.

    Args:
        q: [B, H, Tq, D]. k: [B, Hkv, Tk, D]. v: [B, Hkv, Tk, Dv]. H is a multiple of Hkv (grouped queries).
        pattern: the keys each query attends to, as a `Pattern` or as any FlexAttention
            `mask_mod(b, h, q_idx, kv_idx)`, a function of scalar indices as there. With a `context` q_idx
            counts among all keys, so that decoding with a cache masks as one pass would; without one it
            counts from 0.
        mask_mod: a FlexAttention `mask_mod` by its own name; with a pattern too, both must allow a key.
        layout: the keys that `mask_mod` needs, a function (start, stop) -> `Keys` of a run of queries, or
            the rows of a `Layout`. Keys outside it are masked; without it `mask_mod` is asked about all.
        score_mod: FlexAttention's `score_mod(score, b, h, q_idx, kv_idx)`, on scaled scores.
        relative: terms that depend on the distance of two tokens alone, faster than a score_mod that looks
            them up; added before it.
        context: positions, documents, padding, causality; by default Tq queries that are the last of Tk keys.
        scale: by default 1 / sqrt(D).
        dropout: probability of dropping an attention weight.
        backend: "auto" or one of `BACKENDS`; `explain` says which and why. "flex" is for GPUs and, without
            gradients, for CPUs, where it compiles for seconds for every pattern and shape.
        return_lse: also return the log-sum-exp of every query's scores, to combine several sets of keys.

    Returns:
        [B, H, Tq, Dv], and with `return_lse` also [B, H, Tq]. A query whose keys are all masked gives
        zeros (and minus infinity).

    Raises:
        InputError: shapes, dtypes or devices that do not fit; a backend that cannot take the request.
    """
    key = recall_key(
        q, k, v, pattern, mask_mod, score_mod, relative, context, scale, dropout, backend, return_lse
    )
    if key is not None and (out := recall(context, key, q, k, v)) is not None:
        return out
    request = prepare(q, k, v, pattern, mask_mod, layout, score_mod, relative, context, scale, dropout)
    observe(request)
    out, lse = _run(request, backend, return_lse, key)
    return (out, lse) if return_lse else out


def _run(
    request: Request, backend: str, return_lse: bool, key: Hashable | None
) -> tuple[Tensor, Tensor | None]:
    """Plans and runs a call; one that repeats is remembered under `key`, where one fused kernel does it."""

    def run(request: Request) -> tuple[Tensor, Tensor | None]:
        steps = plan(request, backend, return_lse, repeated=key is not None)
        if not torch.compiler.is_compiling():
            log.debug("attend: %s", steps)
        relative = request.relative
        by_content = relative is not None and relative.position_keys is not None  # other numbers in each call
        if key is not None and not by_content and isinstance(steps, Leaf) and steps.backend == "sdpa":
            return remember(key, request)(request.q, request.k, request.v), None
        return steps.run()

    device = autocast_device(request.q)
    isolated = run_isolated if request.context.share is None else _run_together
    if not is_autocast(device):
        return isolated(request, run)
    with torch.autocast(device, enabled=False):  # `prepare` has cast what autocast would
        return isolated(request, run)


def _run_together(request: Request, run: Run) -> tuple[Tensor, Tensor | None]:
    """`run(request)`: all processes take the same steps, whatever their numbers; parts are isolated."""
    return run(request)
