"""`attend`: softmax attention for any pattern and any score function, through one of several backends.

A call is prepared (`request`), planned (`plan`) and run; `explain` returns the plan.
"""

import logging
from typing import Any, Literal, overload

import torch
from torch import Tensor

from polyformer.attention.functional.call import Call, check_dense, edited_calls, refuse_unknown
from polyformer.attention.functional.isolation import run_isolated
from polyformer.attention.functional.plan import Leaf, Plan, plan
from polyformer.attention.functional.recalled import recall, recall_key, remember
from polyformer.attention.functional.relative import Relative
from polyformer.attention.functional.request import Request, observe, prepare
from polyformer.attention.patterns.base import MaskMod, Pattern, ScoreMod, Where
from polyformer.core.argument_types import names_wrong_types, names_wrong_types_of
from polyformer.core.ops.precision import without_autocast
from polyformer.core.sequence.context import Context

log = logging.getLogger(__name__)


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
@names_wrong_types
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
        pattern: the keys each query attends to: a `Pattern`, its text ("Window(256) | Global(1)"), or a
            FlexAttention `mask_mod(b, h, q_idx, kv_idx)`. With a `context` q_idx counts among all keys, so
            that decoding with a KV cache masks like a single pass; without a `context` it counts from 0.
        mask_mod: a FlexAttention `mask_mod` in addition to `pattern`; with both, both must allow a key.
        layout: the keys that `mask_mod` needs, as a function (start, stop) -> `Keys` of a run of queries or
            the rows of a `Layout`. Other keys are masked. By default `mask_mod` is evaluated for all keys.
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
        minus infinity); torch's function the mean of the values if its mask adds `finfo.min` to the scores.

    Raises:
        InputError: shapes, dtypes or devices that do not match; a backend that cannot run the request; an
            argument of torch's `scaled_dot_product_attention`, with its counterpart here.
    """
    if unknown:
        refuse_unknown("attend", unknown)
    call = Call(
        q, k, v, pattern, mask_mod, layout, score_mod, relative, context, scale, dropout, backend, return_lse
    )
    check_dense(call)
    call = edited_calls.edit(call)
    key = recall_key(call)
    if key is not None and (out := recall(call, key)) is not None:
        return out
    request = prepare(call, key)
    observe(request)
    with without_autocast(q):  # `prepare` has already cast the inputs as autocast would
        out, lse = run_isolated(request, _run)
    return (out, lse) if return_lse else out


def _run(request: Request) -> tuple[Tensor, Tensor | None]:
    """Plan and run a call; store a plan that consists of a single fused kernel, for repeated calls."""
    steps = plan(request)
    if not torch.compiler.is_compiling():
        log.debug("attend: %s", steps)
    # Terms of position keys depend on the queries, so their mask differs between calls.
    by_content = request.relative is not None and request.relative.position_keys is not None
    if request.key is not None and not by_content and isinstance(steps, Leaf) and steps.backend == "sdpa":
        return remember(request)(request.q, request.k, request.v), None
    return steps.run()


@names_wrong_types_of(attend)
def explain(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Plan:
    """Return the plan by which `attend` would run this call now, which can be printed.

    `options` are the options of `attend`. A simple call is a single run of a backend: `.backend` is its name,
    and `.reasons` contains the reasons against the backends before it. A split call has `.leaves` of this
    form, and prints as a tree.
    """
    if unknown := options.keys() - set(Call._fields):
        refuse_unknown("explain", sorted(unknown))
    call = Call(q, k, v, **options)
    check_dense(call)
    return plan(prepare(call, recall_key(call)))
