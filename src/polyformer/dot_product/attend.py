"""`attend`: softmax attention over any pattern and any score function, through one of several backends."""

import dataclasses
import logging
import math
from types import ModuleType
from typing import Literal, overload

import torch
from torch import Tensor

from polyformer.core.errors import InputError, quote, unknown
from polyformer.dot_product import arrange
from polyformer.dot_product.backends import definition, flex, sdpa
from polyformer.dot_product.backends.tiled import run as tiled
from polyformer.dot_product.documents import by_document, run_by_document
from polyformer.dot_product.guard import empty
from polyformer.dot_product.isolation import is_finite, is_readable, run_isolated
from polyformer.dot_product.relative import Relative
from polyformer.dot_product.request import Request, check, transformed
from polyformer.ops.softmax import recording
from polyformer.patterns.base import MaskMod, Pattern, ScoreMod, Where
from polyformer.patterns.implied import implied
from polyformer.patterns.mods import Mod, is_own
from polyformer.patterns.user_defined import Foreign, as_pattern
from polyformer.sequence.context import Context

log = logging.getLogger(__name__)

BACKENDS: dict[str, ModuleType] = {"sdpa": sdpa, "flex": flex, "tiled": tiled, "definition": definition}
"""In the order in which `auto` asks them. Each has `refuses(request, return_lse)` and `run(request)`."""

TRACED = 1 << 26
"""Scores up to which a call inside `torch.compile` is computed densely rather than by breaking the graph."""


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
        pattern: who may see whom: a `Pattern`, or any FlexAttention `mask_mod(b, h, q_idx, kv_idx)`. Mods
            mean what they mean there, for scalar indices. With a `context` q_idx counts among all keys, so
            that a decoder with a cache asks what one pass would; without one it counts from 0.
        mask_mod: a FlexAttention `mask_mod` by its own name; with a pattern too, both must allow a key.
        layout: the keys that `mask_mod` needs, a function (start, stop) -> `Keys` of a run of queries, or
            the rows of a `Layout`; without it every key is looked at. What it leaves out is not seen.
        score_mod: FlexAttention's `score_mod(score, b, h, q_idx, kv_idx)`, on scaled scores.
        relative: terms that depend on the distance of two tokens alone, faster than a score_mod that looks
            them up; added before it.
        context: positions, documents, padding, causality; by default Tq queries that are the last of Tk keys.
        scale: by default 1 / sqrt(D).
        dropout: probability of dropping an attention weight.
        backend: "auto" or one of `BACKENDS`; `explain` says which and why.
        return_lse: also return the log-sum-exp of every row, to join parts with.

    Returns:
        [B, H, Tq, Dv], and with `return_lse` also [B, H, Tq]. A query that sees nothing gives zeros (and
        minus infinity).

    Raises:
        InputError: shapes, dtypes or devices that do not fit; a backend that cannot take the request.
    """
    autocast, memo, key = _autocast(q), None, None
    if (
        context is not None
        and mask_mod is None
        and score_mod is None
        and not return_lse
        and not dropout
        and backend == "auto"
        and not autocast
        and not _watched()
        and _lasting(pattern)
    ):
        memo, key = (
            context.recalled(),
            ("plan", pattern, relative, scale, q.shape, k.shape, v.shape, q.dtype, q.device),
        )
        if (plan := memo.get(key)) is not None:
            out = plan(q, k, v)
            if not (plan.hides and is_readable(out)) or is_finite(out):
                return out
    if q.dim() == 4 and not (q.shape[0] and q.shape[2]) and not recording():  # nobody asks: no mod is run
        request = prepare(
            q, k, v, pattern=None, score_mod=None, context=context, scale=scale, dropout=dropout
        )
        out = empty(request.q, request.v)
        return (out, out.new_empty(out.shape[:3])) if return_lse else out
    request = prepare(
        q,
        k,
        v,
        pattern=joined(pattern, mask_mod, layout),
        score_mod=score_mod,
        relative=relative,
        context=context,
        scale=scale,
        dropout=dropout,
    )
    chosen = None if memo is None else choose(request, backend, return_lse).backend
    run = lambda request: _run(request, backend, return_lse, chosen)  # noqa: E731
    if memo is not None and chosen == "sdpa":
        plan = memo[key] = memo.get(key) or sdpa.plan(request)
        run = lambda request: (plan(request.q, request.k, request.v), None)  # noqa: E731
    if autocast:  # `prepare` has cast what autocast would; inside, float32 is meant
        with torch.autocast(q.device.type, enabled=False):
            out, lse = run_isolated(request, run)
    else:
        out, lse = run_isolated(request, run)
    return (out, lse) if return_lse else out


def _run(
    request: Request, backend: str, return_lse: bool, chosen: str | None = None
) -> tuple[Tensor, Tensor | None]:
    """One call of a backend, the `chosen` one if that is known, or several where those that walk a layout
    have it easier."""
    if backend == "auto" and not recording() and not torch.compiler.is_compiling():
        lengths = by_document(request)
        if lengths is not None:
            return run_by_document(lengths, request, lambda one: _run(one, backend, return_lse))
    name = chosen or choose(request, backend, return_lse).backend
    if name in ("tiled", "flex") and not torch.compiler.is_compiling():
        groups = arrange.by_pattern(request, together=name == "tiled")
        if groups is not None:
            return arrange.run_by_heads(groups, request, lambda one: _run(one, backend, return_lse))
        parts = arrange.by_step(request)
        if parts is not None:
            return arrange.run_by_steps(parts, request, lambda one: _run(one, backend, True))
    return BACKENDS[name].run(request)


def joined(
    pattern: Pattern | MaskMod | None, mask_mod: MaskMod | None, layout: Where | None
) -> Pattern | None:
    """The pattern that these arguments of `attend` say together; None when they limit nothing."""
    if mask_mod is None:
        if layout is not None:
            raise InputError("layout: it says which keys a mask_mod needs, and no mask_mod was given")
        return None if pattern is None else as_pattern(pattern)
    whole = as_pattern(mask_mod, "mask_mod")
    foreign = whole if layout is None else Foreign(mask_mod, layout)
    return foreign if pattern is None else as_pattern(pattern) & foreign


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pattern: Pattern | None,
    score_mod: ScoreMod | None,
    context: Context | None,
    scale: float | None,
    dropout: float,
    relative: Relative | None = None,
) -> Request:
    """The checked request of one call."""
    if _autocast(q):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (
            x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (q, k, v)
        )
    check(q, k, v, dropout)
    by_slot = context is not None
    context = context or Context(q.shape[2], k.shape[2])
    lengths = q.shape[2], k.shape[2]
    if (context.q_len, context.kv_len) != lengths:
        made = f"{context.q_len} queries and {context.kv_len} keys"
        raise InputError(f"context: made for {made}, got {lengths[0]} and {lengths[1]}")
    limits = implied(context)
    if pattern is not None and not pattern.lasting():
        bound = pattern.bound(by_slot, q.device)
        if bound is not pattern:  # what a function says holds for this call alone
            pattern, context = bound, dataclasses.replace(context, memo={})
    if score_mod is not None and not is_own(score_mod):
        score = torch.zeros((), dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
        score_mod = Mod.of(score_mod, "score_mod", score, q.device, context.offset if by_slot else 0)
    if pattern is not None:
        limits = pattern if limits is None else pattern & limits
    if isinstance(scale, float) and not math.isfinite(scale):
        raise InputError(f"scale: expected a finite number, got {scale}")
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    return Request(q, k, v, context, limits, relative, score_mod, scale, dropout)


def _lasting(pattern: object) -> bool:
    """Whether a pattern says in the next call what it says in this."""
    return pattern is None or (isinstance(pattern, Pattern) and pattern.lasting())


def is_traced() -> bool:
    """Whether a graph is being made of this call."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def _watched() -> bool:
    """Whether a call must go the whole way: autograd, a tracer or someone who looks at weights watches it."""
    return torch.is_grad_enabled() or is_traced() or recording() or transformed()


def _autocast(q: Tensor) -> bool:
    device = q.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


@dataclasses.dataclass(frozen=True)
class Choice:
    """The backend that runs a call, and why the ones asked before it do not."""

    backend: str
    reasons: dict[str, str]

    def __str__(self) -> str:
        passed = "; ".join(f"not {name}: {why}" for name, why in self.reasons.items())
        return f"{self.backend} ({passed or 'first choice'})"


def choose(request: Request, backend: str, return_lse: bool) -> Choice:
    """The backend asked for, or the first that takes the request; `definition` while weights are recorded."""
    if backend != "auto" and backend not in BACKENDS:
        raise unknown("backend", backend, ["auto", *BACKENDS])
    asked = BACKENDS if backend == "auto" else [backend]
    reasons: dict[str, str] = {}
    for name in asked if not recording() else ["definition"]:
        why = BACKENDS[name].refuses(request, return_lse)
        traced = is_traced() and backend == "auto" and request.pairs <= TRACED
        if name == "tiled" and traced:
            why = "it would break the graph, and so few scores can be computed at once"
        if why is None:
            break
        reasons[name] = why
    else:
        raise InputError(f"backend {quote(backend)} cannot take this call: {reasons[backend]}; use 'auto'")
    if recording():
        reasons = {other: "attention weights are being recorded" for other in asked if other != name}
    choice = Choice(name, reasons)
    if not torch.compiler.is_compiling():
        log.debug("attend: %s", choice)
    return choice


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pattern: Pattern | MaskMod | None = None,
    mask_mod: MaskMod | None = None,
    layout: Where | None = None,
    score_mod: ScoreMod | None = None,
    relative: Relative | None = None,
    context: Context | None = None,
    dropout: float = 0.0,
    backend: str = "auto",
    return_lse: bool = False,
) -> Choice:
    """Which backend `attend` would run for these inputs, and why not the ones asked before it."""
    request = prepare(
        q,
        k,
        v,
        pattern=joined(pattern, mask_mod, layout),
        score_mod=score_mod,
        relative=relative,
        context=context,
        scale=None,
        dropout=dropout,
    )
    return choose(request, backend, return_lse)
