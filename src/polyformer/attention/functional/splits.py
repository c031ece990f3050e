"""Splits of a call of `attend` into cheaper calls, and how their results are joined.

    ByDocument       a call for each document of packed rows             concatenated along the tokens
    ByHead           a call for each group of heads with one pattern     concatenated along the heads
    ByResidueClass   calls over tokens at multiples of `stride` slots    joined by log-sum-exp

By document: if documents and causality are the only limits, torch needs no mask for a single document. A
row of documents costs the sum of the squares of their lengths; no scores between documents are computed.

By residue class: strided and dilated patterns touch every block of keys, but need few keys of each block.
Within a residue class of the slots the same pattern is dense: a dilated window is a window, every l-th key is
every key. The residue classes of a batch row become rows of a batch, [B, H, T, D] -> [B * stride, H, T /
stride, D], for any backend. A union is split into disjoint parts by their step, and the results of the parts
are joined by log-sum-exp.
"""

import abc
import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.attention.functional.relative import Relative
from polyformer.attention.functional.request import Request
from polyformer.attention.patterns.base import Pattern, ScoreMod
from polyformer.attention.patterns.call_parts import (
    original_indices,
    pattern_in_residue_class,
    residue_class_context,
    residue_class_table,
)
from polyformer.attention.patterns.composition import And, Or, Without
from polyformer.attention.patterns.implied import Causal, Padding, implied
from polyformer.core.host_values import tensor_on
from polyformer.core.ops.softmax import shares
from polyformer.core.sequence.context import Context

Result = tuple[Tensor, Tensor | None]
"""Output [B, H, Tq, Dv] and log-sum-exp [B, H, Tq], None if it was not requested."""


@dataclasses.dataclass(frozen=True, eq=False)
class Split(abc.ABC):
    """A call as several smaller calls `requests`; `join` joins their results."""

    requests: tuple[Request, ...] = dataclasses.field(repr=False)

    name: ClassVar[str]
    needs_lse: ClassVar[bool] = False

    @abc.abstractmethod
    def join(self, outs: Sequence[Tensor], lses: Sequence[Tensor | None]) -> Result:
        """Return the result of the whole call from the results of `requests`, in their order."""

    @abc.abstractmethod
    def label(self, indices: Sequence[int]) -> str:
        """Return a readable description of the requests with these indices."""


WORTH_A_CALL = 32
"""Average number of tokens per document from which on a separate call is faster."""


@dataclasses.dataclass(frozen=True, eq=False)
class ByDocument(Split):
    """A separate call for each document; the results are concatenated."""

    name: ClassVar[str] = "by document"

    def join(self, outs: Sequence[Tensor], lses: Sequence[Tensor | None]) -> Result:
        """Return out = [out_1 .. out_n], concatenated along the tokens."""
        known = [lse for lse in lses if lse is not None]  # some backends always return it
        return torch.cat(list(outs), 2), torch.cat(known, 2) if len(known) == len(outs) else None

    def label(self, indices: Sequence[int]) -> str:
        """Return the number of documents and their lengths."""
        lengths = sorted(self.requests[index].context.q_len for index in indices)
        tokens = f"{lengths[0]}" if lengths[0] == lengths[-1] else f"{lengths[0]} to {lengths[-1]}"
        return f"{len(lengths)} document{'s' * (len(lengths) > 1)} of {tokens} tokens"


def by_document(request: Request) -> ByDocument | None:
    """Return the call split by document if documents (and causality) are the only limits; else None."""
    lengths = document_lengths(request)
    if lengths is None:
        return None
    causal = request.context.causal
    requests = []
    # Inside a document only causality is left, which torch computes without a mask.
    for q, k, v in zip(*(x.split(lengths, 2) for x in (request.q, request.k, request.v))):
        context = Context(q.shape[2], q.shape[2], causal=causal)
        pattern = Causal() if causal else None
        requests.append(dataclasses.replace(request, q=q, k=k, v=v, context=context, pattern=pattern))
    return ByDocument(tuple(requests))


def document_lengths(request: Request) -> list[int] | None:
    """Return the lengths of the documents if separate calls are exact and faster; else None."""
    context = request.context
    if context.q_doc is None or request.q.shape[0] != 1 or request.q.is_cuda or context.offset:
        return None
    if request.score_mod is not None or request.relative is not None or context.kv_valid is not None:
        return None
    if context.q_len != context.kv_len or request.pattern != implied(context):
        return None
    lengths = context.once("lengths of documents", lambda: _lengths(context.q_doc, context.kv_doc))
    return lengths if lengths and len(lengths) * WORTH_A_CALL <= context.q_len else None


def _lengths(q_doc: Tensor | None, kv_doc: Tensor | None) -> list[int]:
    """Return the lengths of the documents in turn; empty if queries and keys are not the same tokens."""
    assert q_doc is not None
    assert kv_doc is not None
    if not torch.equal(q_doc, kv_doc):
        return []
    return q_doc[0].unique_consecutive(return_counts=True)[1].tolist()


ALTERNATIVES = 8
"""Maximum number of alternatives of an intersection of unions; beyond it the intersection is not split."""

CUDA_ROWS = 65_535
"""Maximum number of batch rows of a kernel on CUDA."""


@dataclasses.dataclass(frozen=True, eq=False)
class ByResidueClass(Split):
    """Separate calls for disjoint parts of the pattern, each over the residue classes of its step.

    A part of step 1 keeps the tokens in their order. whole: the call before the split.
    """

    whole: Request = dataclasses.field(repr=False)
    steps: tuple[int, ...]

    name: ClassVar[str] = "by residue class, joined by log-sum-exp"
    needs_lse: ClassVar[bool] = True

    def join(self, outs: Sequence[Tensor], lses: Sequence[Tensor | None]) -> Result:
        """Return out = sum_i e^(lse_i - lse) out_i, lse = log sum_i e^lse_i, in the order of the tokens."""
        ordered_outs, ordered_lses = [], []
        for step, out, lse in zip(self.steps, outs, lses):
            assert lse is not None, "parts are joined by it"
            ordered_outs.append(from_residue_classes(out, self.whole, step))
            ordered_lses.append(from_residue_classes(lse, self.whole, step))
        return join_by_lse(ordered_outs, ordered_lses)

    def label(self, indices: Sequence[int]) -> str:
        """Return the steps of the parts."""
        return f"step{'s' * (len(indices) > 1)} {', '.join(str(self.steps[index]) for index in indices)}"


def by_residue_class(request: Request) -> ByResidueClass | None:
    """Return the call split by the steps of its pattern.

    None if its only step is 1, for few queries, and for more batch rows than a kernel takes.
    """
    parts = None if request.pattern is None else disjoint_by_step(request.pattern, request.context.q_len)
    if parts is None or (request.q.is_cuda and max(parts) * len(request.q) > CUDA_ROWS):
        return None
    requests = tuple(
        to_residue_classes(dataclasses.replace(request, pattern=pattern), step)
        for step, pattern in parts.items()
    )
    return ByResidueClass(requests, request, tuple(parts))


def disjoint_by_step(pattern: Pattern, queries: int) -> dict[int, Pattern] | None:
    """Return disjoint parts of a pattern by their step; None if there is only a part of step 1.

    A step with fewer than 2 queries per residue class counts as 1.
    """
    groups: dict[int, list[Pattern]] = {1: []}
    for alternative in alternatives(pattern):
        step = alternative.structure.step
        groups.setdefault(step if 2 * step <= queries else 1, []).append(alternative)
    if len(groups) == 1:
        return None
    if not groups[1]:
        del groups[1]
    parts: dict[int, Pattern] = {}
    before: Pattern | None = None
    for step, members in groups.items():
        union = functools.reduce(operator.or_, members)
        # Remove the keys of the parts before: a key in two parts would count twice in the sum.
        parts[step] = union if before is None else Without(union, before)
        before = union if before is None else before | union
    return parts


def alternatives(pattern: Pattern) -> list[Pattern]:
    """Return patterns with the union `pattern`: A & C and B & C for (A | B) & C."""
    if isinstance(pattern, Or):
        return [*alternatives(pattern.left), *alternatives(pattern.right)]
    if isinstance(pattern, And):
        lefts, rights = alternatives(pattern.left), alternatives(pattern.right)
        # (A | B) & (C | D) = A & C | A & D | B & C | B & D
        pairs = [left & right for left in lefts for right in rights]
        return pairs if len(pairs) <= ALTERNATIVES else [pattern]
    return [pattern]


def join_by_lse(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return attention over several sets of keys, from outputs [B, H, T, D] and log-sum-exps [B, H, T]."""
    if len(outs) == 1:
        return outs[0], lses[0]
    # A query without keys in any set has lse -inf everywhere, and shares of 0.
    share_of_each, total = shares(torch.stack(lses, -1))
    out = sum(out * share.unsqueeze(-1) for out, share in zip(outs, share_of_each.unbind(-1)))
    assert isinstance(out, Tensor)
    return out.to(outs[0].dtype), total


def to_residue_classes(request: Request, stride: int) -> Request:
    """Return the same call with each residue class as a batch row; its pattern must have this stride."""
    if stride == 1:
        return request
    context = request.context
    assert request.pattern is not None, "what has no pattern has no stride"
    pattern, inner = (
        pattern_in_residue_class(request.pattern, context, stride),
        residue_class_context(context, stride),
    )
    front, keys = context.offset % stride, inner.kv_len * stride
    # Keys are padded to whole steps. Causality or `kv_valid` masks the new keys; else they become padding.
    if keys > context.kv_len and context.kv_valid is None and not context.causal:
        real = torch.arange(keys, device=request.k.device).view(1, -1) < context.kv_len
        valid = residue_class_table(real.expand(len(request.k), -1), 0, keys, stride, edge=False)
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


def from_residue_classes(x: Tensor, request: Request, stride: int) -> Tensor:
    """Return results [B * stride, H, T', ...] in the order of the queries of the call: [B, H, Tq, ...]."""
    if stride == 1:
        return x
    front = request.context.offset % stride
    # [B * stride, H, T', ...] -> [B, stride, H, T', ...] -> [B, H, T', stride, ...] -> [B, H, T, ...]
    whole = x.unflatten(0, (-1, stride)).movedim(1, 3).flatten(2, 3)
    return whole[:, :, front : front + request.context.q_len]


def _score_mod(score_mod: ScoreMod, context: Context, stride: int) -> ScoreMod:
    """Return `score_mod` for a call over residue classes: it receives the original slots of the tokens."""
    inner = residue_class_context(context, stride)

    def at_slots(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        row, query, key = original_indices(context, stride, inner, b, q_idx, kv_idx)
        return score_mod(score, row, h, query, key)

    return at_slots


def _relative(request: Request, stride: int, inner: Context) -> Relative:
    """Return the entries of distances that are multiples of `stride`, with distances in units of `stride`."""
    relative = request.relative
    assert relative is not None
    least, greatest = inner.offset - inner.kv_len + 1, inner.offset + inner.q_len - 1
    whole = relative.over(least * stride, greatest * stride)
    # Within a class only distances that are multiples of `stride` occur.
    changes = {name: table[:, ::stride] for name, table in whole.tables.items()}
    content = relative.content
    if content is not None:
        front = request.context.offset % stride
        content = _split(_padded(content, front, inner.q_len * stride), stride)
    return dataclasses.replace(whole, first=least, content=content, **changes)


def _padded(x: Tensor, front: int, length: int) -> Tensor:
    """Return x [B, H, T, D] padded with zeros on both sides to `length` tokens."""
    after = length - front - x.shape[2]
    return F.pad(x, (0, 0, front, after)) if front or after else x


def _split(x: Tensor, stride: int) -> Tensor:
    """Return x [B, H, T, D] as [B * stride, H, T / stride, D]."""
    # [B, H, T, D] -> [B, H, T / stride, stride, D] -> [B, stride, H, T / stride, D] -> [B * stride, ...]
    return x.unflatten(2, (-1, stride)).movedim(3, 1).flatten(0, 1)


@dataclasses.dataclass(frozen=True, eq=False)
class ByHead(Split):
    """Calls for groups of heads that share a pattern. heads: the heads of each call."""

    heads: tuple[tuple[int, ...], ...]

    name: ClassVar[str] = "by head"

    def join(self, outs: Sequence[Tensor], lses: Sequence[Tensor | None]) -> Result:
        """Return out = [out_1 .. out_H], concatenated along the heads in their order before the split."""
        order = tensor_on([head for group in self.heads for head in group], outs[0].device)
        # The inverse permutation restores the order of the heads.
        back = order.argsort()
        known = [lse for lse in lses if lse is not None]  # some backends always return it
        lse = torch.cat(known, 1).index_select(1, back) if len(known) == len(outs) else None
        return torch.cat(list(outs), 1).index_select(1, back), lse

    def label(self, indices: Sequence[int]) -> str:
        """Return the indices of the heads."""
        heads = sorted(head for index in indices for head in self.heads[index])
        return f"head{'s' * (len(heads) > 1)} {', '.join(map(str, heads))}"


def by_head(request: Request, together: bool) -> ByHead | None:
    """Return the call split into groups of heads that share a pattern; None if all heads share it.

    Return None also if the backend can compute the heads `together` and no pattern has a step.
    """
    if request.pattern is None:
        return None
    groups = request.pattern.heads_by_pattern(request.q.shape[1])
    if groups.keys() <= {request.pattern}:
        return None
    if together:
        queries = request.context.q_len
        if all(disjoint_by_step(pattern, queries) is None for pattern in groups):
            return None
    requests = tuple(_select_heads(request, pattern, heads) for pattern, heads in groups.items())
    return ByHead(requests, tuple(map(tuple, groups.values())))


def _select_heads(request: Request, pattern: Pattern, heads: list[int]) -> Request:
    """Return the call for only these heads, with `pattern` as their pattern."""
    device, number = request.q.device, request.q.shape[1]
    index = tensor_on(heads, device)
    # Query head h reads key head h // groups.
    kv_index = index // request.groups
    relative = None if request.relative is None else request.relative.select_heads(heads, number)
    return dataclasses.replace(
        request,
        q=request.q.index_select(1, index),
        k=request.k.index_select(1, kv_index),
        v=request.v.index_select(1, kv_index),
        pattern=pattern,
        relative=relative,
        score_mod=None if request.score_mod is None else _renumbered(request.score_mod, index),
    )


def _renumbered(score_mod: ScoreMod, heads: Tensor) -> ScoreMod:
    """Return `score_mod` for a call in which head h is head `heads[h]` of the whole call."""
    return lambda score, b, h, q_idx, kv_idx: score_mod(score, b, heads[h], q_idx, kv_idx)
