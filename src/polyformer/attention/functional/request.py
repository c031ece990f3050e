"""The arguments of `attend` as a value (`Call`), and checked and completed as a `Request` for a backend."""

import dataclasses
import math
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from polyformer.attention.functional.relative import Relative
from polyformer.attention.patterns.base import MaskMod, Pattern, ScoreMod, Where
from polyformer.attention.patterns.between_sequences import is_between_sequences
from polyformer.attention.patterns.composition import MaskModPattern, as_pattern
from polyformer.attention.patterns.implied import implied
from polyformer.attention.patterns.mods import Mod, broadcasts, is_own
from polyformer.core.errors import InputError, quote
from polyformer.core.host_values import is_recorded
from polyformer.core.instrumentation import Editor, Recorder, installed
from polyformer.core.ops.softmax import recording
from polyformer.core.sequence.context import Context, SequenceShard

TORCH_ARGUMENTS = {
    "attn_mask": (
        "pass a boolean mask [B, H, Tq, Tk] as mask_mod=lambda b, h, q_idx, kv_idx: "
        "mask[b, h, q_idx, kv_idx], and numbers to add to the scores by a score_mod"
    ),
    "is_causal": 'use pattern="Causal()", which aligns the last query with the last key',
    "dropout_p": "use dropout",
    "enable_gqa": "leave it out: the shapes of q and k say how many queries share a key",
}
"""Arguments of torch's `scaled_dot_product_attention` and their counterparts in `attend`."""


class Call(NamedTuple):
    """Arguments of `attend`, which describes them."""

    q: Tensor
    k: Tensor
    v: Tensor
    pattern: Pattern | MaskMod | str | None = None
    mask_mod: MaskMod | None = None
    layout: Where | None = None
    score_mod: ScoreMod | None = None
    relative: Relative | None = None
    context: Context | None = None
    scale: float | None = None
    dropout: float = 0.0
    backend: str = "auto"
    return_lse: bool = False


edited_calls: Editor[Call] = Editor("edited_calls")
"""Replaces the arguments of every call of `attend`."""


def refuse_unknown(function: str, names: Iterable[str]) -> NoReturn:
    """Raise an error for keyword arguments that a function does not take.

    Raises:
        InputError: an argument of torch's function, with its counterpart.
        TypeError: any other argument.
    """
    for name in names:
        if name in TORCH_ARGUMENTS:
            raise InputError(f"{name}: no argument of {function}, only of torch's; {TORCH_ARGUMENTS[name]}")
    raise TypeError(f"{function}() got an unexpected keyword argument {next(iter(names))!r}")


def check(call: Call) -> None:
    """Raise `InputError` unless q, k and v are dense tensors with matching shapes, types and devices."""
    _check_tensors(call)
    q, k, v, context = call.q, call.k, call.v, call.context
    if not (q.dtype == k.dtype == v.dtype):
        raise InputError(f"q, k, v: expected one dtype, got {q.dtype}, {k.dtype}, {v.dtype}; cast them first")
    if not q.is_floating_point():
        raise InputError(f"q, k, v: expected a floating dtype, got {q.dtype}")
    if not (q.device == k.device == v.device):
        raise InputError(f"q, k, v: expected one device, got {q.device}, {k.device}, {v.device}")
    _check_sizes(q, k, v)
    if not 0.0 <= call.dropout < 1.0:
        raise InputError(f"dropout: expected a probability in [0, 1), got {call.dropout}")
    if isinstance(call.scale, float) and not math.isfinite(call.scale):
        raise InputError(f"scale: expected a finite number, got {call.scale}")
    if context is not None and (context.q_len, context.kv_len) != (q.shape[2], k.shape[2]):
        lengths = f"{context.q_len} queries and {context.kv_len} keys"
        raise InputError(f"context: made for {lengths}, got {q.shape[2]} and {k.shape[2]}")


def _check_tensors(call: Call) -> None:
    for name, tensor in zip("qkv", call):
        if not isinstance(tensor, Tensor):
            raise InputError(f"{name}: expected a tensor [batch, heads, length, width], got {quote(tensor)}")
        if tensor.layout != torch.strided or tensor.is_nested:
            kind = "nested" if tensor.is_nested else str(tensor.layout)
            raise InputError(f"{name}: expected a dense tensor, got a tensor of layout {kind}; make it dense")
        if tensor.dim() != 4:
            raise InputError(
                f"{name}: expected 4 axes [batch, heads, length, width], got {tuple(tensor.shape)}"
            )


def _check_sizes(q: Tensor, k: Tensor, v: Tensor) -> None:
    if k.shape[:3] != v.shape[:3]:
        raise InputError(
            f"k, v: expected the same batch, heads and length, got {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise InputError(f"q, k: expected the same batch and width, got {tuple(q.shape)}, {tuple(k.shape)}")
    if q.shape[3] == 0:
        raise InputError(f"q, k: expected a width of 1 or more, got {tuple(q.shape)}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise InputError(f"k: expected a number of heads that divides {q.shape[1]}, got {k.shape[1]}")


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """Inputs of a call of `attend`, for a backend.

    Args:
        q: [B, H, Tq, D]; k: [B, Hkv, Tk, D]; v: [B, Hkv, Tk, Dv]; H is a multiple of Hkv.
        pattern: all limits on the keys of each query, including the limits of the context; None for no limit.
            If a sequence is spread over processes, this is the pattern of the whole sequence.
        relative: terms by distance, added to the scores before `score_mod`, and to the values.
        score_mod: applied to the scaled scores.
        scale: the factor on q k^T.
        dropout: probability that an attention weight is dropped.
        backend: "auto", or the only backend that may run the call.
        return_lse: whether the backend must return the log-sum-exp.
        repeats: whether other layers make the same call of this context, so that a mask pays.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    context: Context
    pattern: Pattern | None
    relative: Relative | None
    score_mod: ScoreMod | None
    scale: float
    dropout: float = 0.0
    backend: str = "auto"
    return_lse: bool = False
    repeats: bool = False

    @property
    def groups(self) -> int:
        """Return the number of query heads per key head."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def pairs(self) -> int:
        """Return the number of scores of a dense computation."""
        return self.q.shape[0] * self.q.shape[1] * self.context.q_len * self.context.kv_len

    def whole_score_mod(self, context: Context) -> ScoreMod | None:
        """Return `score_mod` with the relative terms, for a backend that supports only a `score_mod`."""
        if self.relative is None:
            return self.score_mod
        k = self.k.repeat_interleave(self.groups, dim=1)
        first, then = self.relative.score_mod(self.q, k, self.scale, context), self.score_mod
        if then is None:
            return first
        return lambda score, *place: then(first(score, *place), *place)


def score_scale(scale: float | None, width: int) -> float:
    """Return the factor of the products of queries and keys [..., width]: `scale`, or 1 / sqrt(width)."""
    return 1 / math.sqrt(width) if scale is None else scale


def prepare(call: Call, repeats: bool = False) -> Request:
    """Return the request of a call, whose inputs have the type of autocast; raises `InputError` for invalid
    arguments."""
    q, k, v, pattern, mask_mod, layout, score_mod, relative, context, scale, *_ = call
    spread = context is not None and context.shard is not None
    if q.dim() == 4 and not (q.shape[0] and q.shape[2]) and not recording() and not spread:
        pattern = mask_mod = layout = score_mod = None  # functions of indices cannot run without a query
    check(call)
    scale = score_scale(scale, q.shape[3])
    by_slot = context is not None  # else the indices of a mask_mod start at 0, as in FlexAttention
    rule = combine_patterns(pattern, mask_mod, layout)
    if context is None:
        # Two sequences both start at 0; queries within a sequence are its last tokens.
        q_start = 0 if rule is not None and is_between_sequences(rule) else None
        context = Context(q.shape[2], k.shape[2], q_start=q_start)
    limits = implied(context.whole or context)
    if rule is not None and not rule.is_static():
        bound = rule.bind(by_slot, q.device)
        if bound is not rule:  # results of a function are valid only for this call and need a new memo
            rule, context = bound, dataclasses.replace(context, memo={})
    if rule is not None:
        limits = rule if limits is None else rule & limits
    if score_mod is not None and not is_own(score_mod):
        score_type = torch.promote_types(q.dtype, torch.float32)
        score_mod = Mod.of(score_mod, "score_mod", score_type, q.device, context.offset if by_slot else 0)
        score_mod = by_slots(score_mod, context.shard, q.device)
    request = Request(
        q,
        k,
        v,
        context,
        limits,
        relative,
        score_mod,
        scale,
        call.dropout,
        call.backend,
        call.return_lse,
        repeats,
    )
    if relative is None or context.last_position is None:
        return request
    # A diagonal of pairs then has several distances, which no backend expects of `relative`.
    assert relative.position_values is None
    terms = request.whole_score_mod(context)
    return dataclasses.replace(request, relative=None, score_mod=None if terms is None else broadcasts(terms))


def by_slots(score_mod: ScoreMod, shard: SequenceShard | None, device: torch.device) -> ScoreMod:
    """Return a user's `score_mod` for the queries of a process: it receives the slots of the queries."""
    if shard is None:
        return score_mod
    slots = shard.slots(device)  # here, because a compiler translates the function for a single pair

    @broadcasts
    def at_slots(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score_mod(score, b, h, slots[q_idx], kv_idx)

    return at_slots


def combine_patterns(
    pattern: Pattern | MaskMod | str | None, mask_mod: MaskMod | None, layout: Where | None
) -> Pattern | None:
    """Return the intersection of these arguments of `attend`; None if they set no limit."""
    if mask_mod is None:
        if layout is not None:
            raise InputError("layout: it says which keys a mask_mod needs, and no mask_mod was given")
        return None if pattern is None else as_pattern(pattern)
    rule = as_pattern(mask_mod, "mask_mod")
    if layout is not None:
        rule = MaskModPattern(mask_mod, layout)
    return rule if pattern is None else as_pattern(pattern) & rule


def requires_gradients(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether a call with these inputs builds a graph."""
    return torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)


def is_ordinary() -> bool:
    """Return whether no compiler, tracer, transform or instrument looks into the operations of a call."""
    if installed or torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
        return False
    return torch._C._get_tracing_state() is None and not transformed()


def is_traced() -> bool:
    """Return whether this call is being compiled, traced or recorded."""
    traced = torch._C._get_tracing_state() is not None or is_recorded()
    return traced or torch.compiler.is_compiling()


def transformed() -> bool:
    """Return whether a transform of `torch.func` or forward differentiation is active."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def indices(request: Request) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return broadcast indices b [B,1,1,1], h [1,H,1,1], q [Tq,1], kv [Tk] of the dense score tensor."""
    device = request.q.device
    b = torch.arange(request.q.shape[0], device=device).view(-1, 1, 1, 1)
    h = torch.arange(request.q.shape[1], device=device).view(1, -1, 1, 1)
    q_idx = torch.arange(request.context.q_len, device=device).view(-1, 1)
    return b, h, q_idx, torch.arange(request.context.kv_len, device=device)


_recorder: Recorder[Request] = Recorder("observed_calls")


def observed() -> AbstractContextManager[list[Request]]:
    """Collect the requests of all calls of `attend` in the context, in order; the calls run as usual."""
    return _recorder.collect()


def observing() -> bool:
    """Return whether requests are being collected."""
    return _recorder.records is not None


def observe(request: Request) -> None:
    """Pass a call to all active collectors."""
    _recorder.record(request)
