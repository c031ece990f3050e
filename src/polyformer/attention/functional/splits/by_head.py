"""Heads with different patterns: a separate call for each group of heads that share a pattern."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from polyformer.attention.functional.request import Request
from polyformer.attention.functional.splits.base import Result, Split
from polyformer.attention.functional.splits.by_residue_class import disjoint_by_step
from polyformer.attention.patterns.base import Pattern, ScoreMod
from polyformer.core.host_values import tensor_on


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
