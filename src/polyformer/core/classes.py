"""Tokens in residue classes: where only slots a multiple of `stride` apart meet, each class is a sequence.

Strided and dilated patterns touch every block of keys, though they need few keys of each. With the tokens of
a class side by side the same pattern is dense: a dilated window is a window, every l-th key is every key. The
classes of a batch row become rows of a batch, [B, H, T, D] -> [B * stride, H, T / stride, D], for any engine.
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.core.context import Context
from polyformer.core.layout import Keys, unite
from polyformer.core.pattern import Pattern, ScoreMod
from polyformer.core.patterns import Padding
from polyformer.core.request import Request


def in_classes(request: Request, stride: int) -> Request:
    """The same call with the tokens of each class as a batch row; its pattern must have this stride."""
    context = request.context
    assert request.pattern is not None, "what has no pattern has no stride"
    pattern, inner = request.pattern.every(context, stride), class_context(context, stride)
    front, keys = context.offset % stride, inner.kv_len * stride
    if keys > context.kv_len and context.kv_valid is None and not context.causal:
        real = torch.arange(keys, device=request.k.device).view(1, -1) < context.kv_len
        valid = _table(real.expand(len(request.k), -1), 0, keys, stride, edge=False)
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


def class_context(context: Context, stride: int) -> Context:
    """Where the tokens of each class stand among themselves.

    Documents, validity and causality are all that it says: patterns that ask for more ask the first context.
    """
    first, front = divmod(context.offset, stride)
    queries, keys = -(-(front + context.q_len) // stride), -(-context.kv_len // stride)
    tables = {}
    for name, table, start, length in (
        ("kv_valid", context.kv_valid, 0, keys),
        ("kv_doc", context.kv_doc, 0, keys),
        ("q_doc", context.q_doc, front, queries),
    ):
        if table is not None:
            tables[name] = _table(table, start, length * stride, stride, edge=name != "kv_valid")
    return Context(queries, keys, causal=context.causal, q_start=first, **tables)


@dataclasses.dataclass(frozen=True)
class InClass(Pattern, named=False):
    """A pattern as the tokens of a class meet it, by asking it about the slots they come from."""

    pattern: Pattern
    context: Context
    apart: int  # the slots from one token of a class to the next

    def lasting(self) -> bool:
        return False

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        place = original(self.context, self.apart, context, b, q_idx, kv_idx)
        return self.pattern.allows(self.context, place[0], h, *place[1:])

    def keys(self, context: Context, start: int, stop: int) -> Keys:
        step, offset = self.apart, self.context.offset
        first = max((start + context.offset) * step - offset, 0)
        last = min((stop + context.offset) * step - offset, self.context.q_len)
        if first >= last:
            return Keys(())
        found = self.pattern.keys(self.context, first, last)
        return Keys(unite((a // step, (b - 1) // step + 1) for a, b in found.some),
                    unite((-(-a // step), b // step) for a, b in found.full))  # fmt: skip


def original(context: Context, stride: int, inner: Context, b: Tensor, q_idx: Tensor,
             kv_idx: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The batch row, query and key of `context` that these are in the classes' context `inner`.

    What was added to fill the classes gives some token: nobody sees it, and its own output is not used.
    """
    row = torch.div(b, stride, rounding_mode="floor")
    rest = b - row * stride
    query = (q_idx + inner.offset) * stride + rest - context.offset
    return row, query.clamp(0, context.q_len - 1), (kv_idx * stride + rest).clamp_max(context.kv_len - 1)


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


def _table(x: Tensor, front: int, length: int, stride: int, edge: bool) -> Tensor:
    """x [B, T] as [B * stride, length / stride]; what is added is False, or like its neighbour."""
    after = length - front - x.shape[1]
    before_it, after_it = x[:, :1].expand(-1, front), x[:, -1:].expand(-1, after)
    if not edge:
        before_it, after_it = torch.zeros_like(before_it), torch.zeros_like(after_it)
    whole = torch.cat([before_it, x, after_it], 1)
    return whole.unflatten(1, (-1, stride)).mT.flatten(0, 1)
