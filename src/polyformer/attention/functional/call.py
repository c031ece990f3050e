"""`Call`: the arguments of `attend` as a value, with their checks."""

from collections.abc import Iterable
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from polyformer.attention.functional.relative import Relative
from polyformer.attention.patterns.base import MaskMod, Pattern, ScoreMod, Where
from polyformer.core.editor import Editor
from polyformer.core.errors import InputError, quote
from polyformer.core.sequence.context import Context

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


def check_dense(call: Call) -> None:
    """Raise `InputError` unless the inputs of a call are dense tensors."""
    for name, tensor in zip("qkv", call):
        if not isinstance(tensor, Tensor):
            raise InputError(f"{name}: expected a tensor [batch, heads, length, width], got {quote(tensor)}")
        if tensor.layout != torch.strided or tensor.is_nested:
            kind = "nested" if tensor.is_nested else str(tensor.layout)
            raise InputError(f"{name}: expected a dense tensor, got a tensor of layout {kind}; make it dense")


def check(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> None:
    """Raise `InputError` unless the shapes, types and devices of a call match."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise InputError(
                f"{name}: expected 4 axes [batch, heads, length, width], got {tuple(tensor.shape)}"
            )
    if not (q.dtype == k.dtype == v.dtype):
        raise InputError(f"q, k, v: expected one dtype, got {q.dtype}, {k.dtype}, {v.dtype}; cast them first")
    if not q.is_floating_point():
        raise InputError(f"q, k, v: expected a floating dtype, got {q.dtype}")
    if not (q.device == k.device == v.device):
        raise InputError(f"q, k, v: expected one device, got {q.device}, {k.device}, {v.device}")
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
    if not 0.0 <= dropout < 1.0:
        raise InputError(f"dropout: expected a probability in [0, 1), got {dropout}")
