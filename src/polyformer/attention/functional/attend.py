"""`attend`: softmax attention for any pattern and any score function, through one of several backends.

Most calls need no mask and run torch's kernel at once (`unmasked`). Any other call is prepared (`request`),
planned (`plan`) and run; `explain` returns the plan. Plans are stored, so that calls that differ only in the
numbers of q, k and v are checked and planned once, such as the calls of the layers of a model.
"""

import dataclasses
import functools
import logging
import math
import threading
from collections.abc import Hashable
from typing import Any, Literal, Protocol, TypeVar, overload

import torch
from torch import Tensor

from polyformer.attention.functional.backends import sdpa
from polyformer.attention.functional.isolation import if_finite, run_isolated, without_padding_keys
from polyformer.attention.functional.plan import BACKENDS, Leaf, Plan, plan
from polyformer.attention.functional.relative import Relative
from polyformer.attention.functional.request import (
    Call,
    Request,
    check,
    edited_calls,
    is_ordinary,
    observe,
    prepare,
    refuse_unknown,
    requires_gradients,
    score_scale,
)
from polyformer.attention.patterns.base import MaskMod, Pattern, ScoreMod, Where, parts_in
from polyformer.attention.patterns.composition import MaskModPattern, as_pattern, simple_parts
from polyformer.attention.patterns.implied import Causal, Full
from polyformer.attention.patterns.mods import rule_key
from polyformer.core.instrumentation import installed
from polyformer.core.modules import names_wrong_types, names_wrong_types_of
from polyformer.core.ops.autograd import autocast_device, in_autocast_type, is_autocast, without_autocast
from polyformer.core.sequence.context import Context

log = logging.getLogger(__name__)

Output = Tensor | tuple[Tensor, Tensor | None]


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
    return attend_call(call)


def attend_call(call: Call) -> Any:
    """Return `attend` of these arguments, by a stored plan or else by a plan that is then stored."""
    q = call.q
    if torch._C._is_any_autocast_enabled() and isinstance(q, Tensor) and is_autocast(autocast_device(q)):
        inputs = {name: in_autocast_type(getattr(call, name)) for name in "qkv"}
        with without_autocast(q):
            return attend_call(call._replace(**inputs))
    stored: StoredPlan | None = unmasked(call)
    key = plan_key(call) if stored is None else None
    if key is not None:
        stored = _plans.get(key)
        if stored is None and call.context is not None:
            stored = call.context.recalled().get(key)
    try:
        if stored is not None and (out := stored.run(call)) is not None:
            return out
    except RuntimeError:
        check(call)  # names the fault of the inputs, if it is theirs
        raise
    check(call)
    return _planned(call, key)


def _planned(call: Call, key: Hashable | None) -> Any:
    """Return `attend` of a call by the plan of any backend, and store the plan if it has a key."""
    if installed:
        call = edited_calls.edit(call)
    request = prepare(call, key is not None and _repeats(call))
    if installed:
        observe(request)

    def run(request: Request) -> tuple[Tensor, Tensor | None]:
        steps = plan(request)
        if not torch.compiler.is_compiling():
            log.debug("attend: %s", steps)
        stored = None if key is None else _store(key, call, steps)
        if isinstance(stored, StoredKernel):
            return stored.kernel(request.q, request.k, request.v, request.dropout), None
        return steps.run()

    out, lse = run_isolated(request, run)
    return (out, lse) if call.return_lse else out


def unmasked(call: Call) -> "StoredKernel | None":
    """Return torch's fused attention for a call that needs no mask; None for any other call.

    Each query then sees all keys, or with equally many keys the query at slot i the keys up to slot i. No
    other backend is faster, so nothing is planned. None too for calls that somebody looks into
    (`is_ordinary`).
    """
    q, k, v, pattern, mask_mod, layout, score_mod, relative, context, scale, dropout, backend, lse = call
    changed = not (mask_mod is layout is score_mod is relative is None)
    if changed or lse or backend not in ("auto", "sdpa") or (context is not None and context.numbers is None):
        return None
    kind = type(as_pattern(pattern) if isinstance(pattern, str) else pattern)
    if kind not in (type(None), Full, Causal) or not (type(q) is type(k) is type(v) is Tensor):
        return None
    if not is_ordinary():
        return None
    return _kernel(q, k, v, (context, kind is Causal), scale, dropout)


def _kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    limits: tuple[Context | None, bool],
    scale: float | None,
    dropout: float,
) -> "StoredKernel | None":
    """Return torch's fused attention of a call that needs no mask, None for other calls and sizes.

    limits: the context of the call, and whether it is causal in any case.
    """
    try:
        (rows, heads, queries, width), (_, kv_heads, keys, _) = q.shape, k.shape
    except (ValueError, RuntimeError):  # not four axes, or a nested tensor
        return None
    sizes = rows, kv_heads, keys
    if k.shape != (*sizes, width) or v.shape[:3] != sizes or not kv_heads or heads % kv_heads or not width:
        return None
    context, causal = limits
    first = keys - queries
    if context is not None:
        if context.q_len != queries or context.kv_len != keys:
            return None
        first, causal = context.offset, causal or context.causal
    # A larger call may need another backend.
    most = sdpa.DROPOUT_LIMIT if dropout else sdpa.DENSE_LIMIT
    how = sdpa.causal_kernel(queries, keys, first) if causal else "full"
    if how is None or not 0 < rows * heads * queries * keys <= most or not 0 <= dropout < 1:
        return None
    return _fused(how == "causal", score_scale(scale, width), heads != kv_heads, requires_gradients(q, k, v))


@functools.lru_cache(maxsize=64)
def _fused(causal: bool, scale: float, grouped: bool, builds_graph: bool) -> "StoredKernel | None":
    """Return torch's fused attention without a mask; None for a scale that is no number."""
    plan = sdpa.Plan(None, None, causal, scale, grouped, hides=causal)
    return StoredKernel(plan, builds_graph) if math.isfinite(scale) else None


class StoredPlan(Protocol):
    """The plan of a call without its inputs."""

    def run(self, call: Call) -> Output | None:
        """Return the result of a call with this plan; None if the call needs another plan."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class StoredKernel:
    """A run of torch's fused attention."""

    kernel: sdpa.Plan
    builds_graph: bool

    def run(self, call: Call) -> Tensor | None:
        """Return the output [B, H, Tq, Dv]; None if a NaN or infinity must be isolated."""
        q, k, v = call.q, call.k, call.v
        if self.kernel.hides and q.is_cpu:
            result = if_finite(self._of, call, self.builds_graph)
            return None if result is None else result[0]
        if self.kernel.hides and call.context is not None:
            k, v = without_padding_keys(k, v, call.context)
        return self.kernel(q, k, v, call.dropout)

    def _of(self, call: Call) -> tuple[Tensor, None]:
        return self.kernel(call.q, call.k, call.v, call.dropout), None


@dataclasses.dataclass(frozen=True, eq=False)
class StoredBackend:
    """A run of a backend. options: the fields of its request besides q, k, v and the context."""

    backend: str
    options: dict[str, Any]
    own_context: Context | None  # of a call without a context

    def run(self, call: Call) -> Output:
        """Return the output [B, H, Tq, Dv], and the log-sum-exp if the call asks for it."""
        context = call.context or self.own_context
        assert context is not None
        request = Request(call.q, call.k, call.v, context, **self.options)
        out, lse = run_isolated(request, BACKENDS[self.backend].run)
        return (out, lse) if call.return_lse else out


P = TypeVar("P", bound=StoredPlan)

_plans: dict[Hashable, StoredPlan] = {}
"""Stored plans of small calls that numbers describe completely, the oldest first."""

_lock = threading.Lock()

STORED, SMALL = 64, 1 << 20
"""The most plans in `_plans`, and the most scores of such a call: masks stay in memory."""


def plan_key(call: Call) -> Hashable | None:
    """Return the key under which the plan of a call is stored, or None if it cannot be used again.

    Functions of indices may read values that change. Tracers, transforms of `torch.func` and instruments
    look into a call, so it is planned anew. The context stores the plans of its calls.
    """
    q, k, v, pattern, mask_mod, layout, score_mod, relative, context, scale, dropout, backend, return_lse = (
        call
    )
    if not (type(q) is type(k) is type(v) is Tensor) or score_mod is not None or layout is not None:
        return None
    if not is_ordinary() or q.is_nested or k.is_nested or v.is_nested:
        return None
    grad = torch.is_grad_enabled()
    if relative is not None and (grad or context is None):
        return None
    if context is not None and context.shard is not None:
        return None
    if not (pattern is None or isinstance(pattern, str | Pattern)) and (pattern := rule_key(pattern)) is None:
        return None
    if mask_mod is not None and (mask_mod := rule_key(mask_mod)) is None:
        return None
    builds_graph = grad and (q.requires_grad or k.requires_grad or v.requires_grad)
    mode = grad, builds_graph, torch.is_inference_mode_enabled()
    form = q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device
    numbers = None if context is None else context.numbers or "tables"
    return pattern, mask_mod, relative, scale, dropout, backend, return_lse, numbers, mode, form


def _repeats(call: Call) -> bool:
    """Return whether other layers will make the same call without gradients, so that a mask pays."""
    usual = not call.dropout and call.backend == "auto" and not call.return_lse
    return call.context is not None and usual and not torch.is_grad_enabled()


def _store(key: Hashable, call: Call, steps: Plan) -> StoredPlan | None:
    """Store and return a plan that is a single run of a backend and depends on nothing but the key."""
    if not isinstance(steps, Leaf) or steps.request.score_mod is not None or call.q.layout != torch.strided:
        return None
    if not _is_fixed(call.pattern, steps.request.pattern):
        return None
    return _keep(key, call, stored_plan(steps, call))


def _keep(key: Hashable, call: Call, stored: P) -> P:
    """Store the plan of a call for all calls that numbers describe, or for calls of this context."""
    scores = math.prod(call.q.shape[:3]) * call.k.shape[2]
    if _is_shared(call) and is_value(call.pattern) and scores <= SMALL:
        with _lock:
            while len(_plans) >= STORED:
                del _plans[next(iter(_plans))]
            _plans[key] = stored
    elif call.context is not None:
        call.context.recalled()[key] = stored
    return stored


def _is_shared(call: Call) -> bool:
    """Return whether numbers describe a call completely, so that calls of other contexts have its plan.

    Steps of decoding have another length each time.
    """
    context = call.context
    if context is None:
        return True
    numbers_only = context.numbers is not None and call.relative is None
    return numbers_only and call.q.shape[2] > 1


def stored_plan(leaf: Leaf, call: Call) -> StoredPlan:
    """Return a plan without the inputs of its call."""
    request = leaf.request
    # Terms of position keys depend on the queries, so their mask differs between calls.
    by_content = request.relative is not None and request.relative.position_keys is not None
    if leaf.backend == "sdpa" and not by_content:
        return StoredKernel(sdpa.plan(request), requires_gradients(request.q, request.k, request.v))
    names = [field.name for field in dataclasses.fields(Request)]
    options = {name: getattr(request, name) for name in names if name not in ("q", "k", "v", "context")}
    return StoredBackend(leaf.backend, options, request.context if call.context is None else None)


def _is_fixed(stated: Pattern | MaskMod | str | None, rule: Pattern | None) -> bool:
    """Return whether the rule of a call depends only on its key.

    stated: the pattern of the call. rule: with the limits of the context, and with functions bound.
    """
    if isinstance(stated, Pattern) and not stated.is_static():
        return False
    parts = [] if rule is None else simple_parts(rule)
    return all(part.is_static() or (isinstance(part, MaskModPattern) and part.is_program()) for part in parts)


def is_value(pattern: Pattern | MaskMod | str | None) -> bool:
    """Return whether a pattern consists of numbers and names, so that equal patterns have equal rules.

    `plan_key` has looked into a function that is the pattern itself.
    """
    if not isinstance(pattern, Pattern):
        return True
    return all(isinstance(part, Pattern | tuple | int | float | str | None) for part in parts_in(pattern))


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
    call = call._replace(**{name: in_autocast_type(getattr(call, name)) for name in "qkv"})
    return plan(prepare(call, plan_key(call) is not None and _repeats(call)))
