"""`attend`: softmax attention for any pattern and any score function, through one of several backends."""

import logging
from collections.abc import Callable, Hashable
from typing import Literal, overload

import torch
from torch import Tensor

from polyformer.attention.functional.isolation import run_isolated
from polyformer.attention.functional.observed import observe
from polyformer.attention.functional.plan import Leaf, plan
from polyformer.attention.functional.recalled import recall, recall_key, remember
from polyformer.attention.functional.relative import Relative
from polyformer.attention.functional.request import Request, check_dense, is_autocast, prepare
from polyformer.attention.functional.torch_arguments import refuse_unknown
from polyformer.attention.patterns.base import MaskMod, Pattern, ScoreMod, Where
from polyformer.core.ops.precision import autocast_device
from polyformer.core.sequence.context import Context

log = logging.getLogger(__name__)

Run = Callable[[Request], tuple[Tensor, Tensor | None]]


@overload
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pattern: Pattern | MaskMod | str | None = ...,
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
    pattern: Pattern | MaskMod | str | None = ...,
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
    **unknown,
):
    """Compute softmax(score_mod(q k^T * scale)) v over the keys that the pattern and the context allow.

    Args:
        q: [B, H, Tq, D]. k: [B, Hkv, Tk, D]. v: [B, Hkv, Tk, Dv]. H is a multiple of Hkv (grouped queries).
        pattern: the keys each query attends to: a `Pattern`, its text ("Window(256) | Global(1)"), or any
            FlexAttention `mask_mod(b, h, q_idx, kv_idx)`, a function of scalar indices as in FlexAttention.
            With a `context` q_idx counts among all keys, so that decoding with a KV cache masks like a
            single pass; without a `context` it counts from 0.
        mask_mod: a FlexAttention `mask_mod` in addition to `pattern`; with both, both must allow a key.
        layout: the keys that `mask_mod` needs: a function (start, stop) -> `Keys` of a run of queries, or
            the rows of a `Layout`. Keys outside it are masked; without it `mask_mod` is evaluated for all
            keys.
        score_mod: FlexAttention's `score_mod(score, b, h, q_idx, kv_idx)`, applied to scaled scores.
        relative: terms that depend only on the distance of two tokens, added before the `score_mod`; faster
            than a `score_mod` that looks them up.
        context: positions, documents, padding, causality; by default Tq queries that are the last of Tk keys.
        scale: by default 1 / sqrt(D).
        dropout: probability of dropping an attention weight.
        backend: "auto" or one of `BACKENDS`; `explain` returns the choice and its reasons. "flex" is for GPUs
            and, without gradients, for CPUs, where it compiles for seconds for each pattern and shape.
        return_lse: also return the log-sum-exp of the scores of each query, to combine several sets of keys.

    Returns:
        [B, H, Tq, Dv], and with `return_lse` also [B, H, Tq]. A query with no allowed key returns zeros (and
        minus infinity). torch's function returns the mean of the values there if its mask adds `finfo.min`
        to the scores, and zeros if the mask is boolean.

    Raises:
        InputError: shapes, dtypes or devices that do not match; a backend that cannot run the request; an
            argument of torch's `scaled_dot_product_attention`, with its counterpart here.
    """
    if unknown:
        refuse_unknown("attend", unknown)
    check_dense(q, k, v)
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
    """Plan and run a call; a plan with a single fused kernel is stored under `key` for repeated calls."""

    def run(request: Request) -> tuple[Tensor, Tensor | None]:
        steps = plan(request, backend, return_lse, repeated=key is not None)
        if not torch.compiler.is_compiling():
            log.debug("attend: %s", steps)
        relative = request.relative
        # Terms of position keys depend on the queries, so their mask differs between calls.
        by_content = relative is not None and relative.position_keys is not None
        if key is not None and not by_content and isinstance(steps, Leaf) and steps.backend == "sdpa":
            return remember(key, request)(request.q, request.k, request.v), None
        return steps.run()

    device = autocast_device(request.q)
    isolated = run_isolated if request.context.shard is None else _run_together
    if not is_autocast(device):
        return isolated(request, run)
    with torch.autocast(device, enabled=False):  # `prepare` has already cast the inputs as autocast would
        return isolated(request, run)


def _run_together(request: Request, run: Run) -> tuple[Tensor, Tensor | None]:
    """Run the request without a check of its values, so that all processes take the same steps.

    The parts of the call are isolated instead.
    """
    return run(request)
