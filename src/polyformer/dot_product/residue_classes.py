"""Tokens in residue classes: where only slots a multiple of `stride` apart meet, each class is a sequence.

Strided and dilated patterns touch every block of keys, though they need few keys of each. With the tokens of
a class side by side the same pattern is dense: a dilated window is a window, every l-th key is every key. The
classes of a batch row become rows of a batch, [B, H, T, D] -> [B * stride, H, T / stride, D], for any engine.
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.dot_product.request import Request
from polyformer.patterns.base import ScoreMod
from polyformer.patterns.implied import Padding
from polyformer.patterns.residue_class import class_context, class_table, in_class, original
from polyformer.sequence.context import Context


def in_classes(request: Request, stride: int) -> Request:
    """The same call with the tokens of each class as a batch row; its pattern must have this stride."""
    context = request.context
    assert request.pattern is not None, "what has no pattern has no stride"
    pattern, inner = in_class(request.pattern, context, stride), class_context(context, stride)
    front, keys = context.offset % stride, inner.kv_len * stride
    if keys > context.kv_len and context.kv_valid is None and not context.causal:
        real = torch.arange(keys, device=request.k.device).view(1, -1) < context.kv_len
        valid = class_table(real.expand(len(request.k), -1), 0, keys, stride, edge=False)
        inner, pattern = dataclasses.replace(inner, kv_valid=valid, memo={}), pattern & Padding()
    return dataclasses.replace(
        request,
        q=_split(_padded(request.q, front, inner.q_len * stride), stride),
        k=_split(_padded(request.k, 0, keys), stride),
        v=_split(_padded(request.v, 0, keys), stride),
        context=inner,
        pattern=pattern,
        relative=None if request.relative is None else _relative(request, stride, inner),
        score_mod=None if request.score_mod is None else _score_mod(request.score_mod, context, stride),
    )


def from_classes(x: Tensor, request: Request, stride: int) -> Tensor:
    """What `in_classes` gave, [B * stride, H, T', ...], in the order of the call: [B, H, Tq, ...]."""
    front = request.context.offset % stride
    whole = x.unflatten(0, (-1, stride)).movedim(1, 3).flatten(2, 3)
    return whole[:, :, front : front + request.context.q_len]


def _score_mod(score_mod: ScoreMod, context: Context, stride: int) -> ScoreMod:
    inner = class_context(context, stride)

    def moved(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        row, query, key = original(context, stride, inner, b, q_idx, kv_idx)
        return score_mod(score, row, h, query, key)

    return moved


def _relative(request: Request, stride: int, inner: Context):
    """The entries of the distances that are left, counted in steps of `stride`."""
    relative = request.relative
    assert relative is not None
    least, greatest = inner.offset - inner.kv_len + 1, inner.offset + inner.q_len - 1
    whole = relative.over(least * stride, greatest * stride)
    changes = {name: table[:, ::stride] for name, table in whole.tables.items()}
    content = relative.content
    if content is not None:
        front = request.context.offset % stride
        content = _split(_padded(content, front, inner.q_len * stride), stride)
    return dataclasses.replace(whole, first=least, content=content, **changes)


def _padded(x: Tensor, front: int, length: int) -> Tensor:
    """x [B, H, T, D] with zeros on both sides, `length` tokens in all."""
    after = length - front - x.shape[2]
    return F.pad(x, (0, 0, front, after)) if front or after else x


def _split(x: Tensor, stride: int) -> Tensor:
    """[B, H, T, D] -> [B * stride, H, T / stride, D]."""
    return x.unflatten(2, (-1, stride)).movedim(3, 1).flatten(0, 1)
