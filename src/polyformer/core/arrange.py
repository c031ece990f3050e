"""Calls that are easier as several: heads with patterns of their own.

What is left to a backend has one pattern for all heads. The oracle, `definition`, is never rearranged.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from polyformer.core.pattern import Pattern, ScoreMod
from polyformer.core.request import Request

Run = Callable[[Request], tuple[Tensor, Tensor | None]]


def by_pattern(request: Request) -> dict[Pattern, list[int]] | None:
    """The heads that share a pattern; None where all do."""
    if request.pattern is None:
        return None
    groups: dict[Pattern, list[int]] = {}
    for head in range(request.q.shape[1]):
        groups.setdefault(request.pattern.of_head(head), []).append(head)
    return groups if len(groups) > 1 or request.pattern not in groups else None


def run_by_heads(
    groups: dict[Pattern, list[int]], request: Request, run: Run
) -> tuple[Tensor, Tensor | None]:
    """Every group of heads in a call of its own, put together again."""
    outs, sums = zip(*(run(_of_heads(request, pattern, heads)) for pattern, heads in groups.items()))
    order = [head for heads in groups.values() for head in heads]
    back = torch.tensor(order, device=request.q.device).argsort()
    joined = torch.cat(outs, 1).index_select(1, back)
    return joined, None if sums[0] is None else torch.cat(sums, 1).index_select(1, back)


def _of_heads(request: Request, pattern: Pattern, heads: list[int]) -> Request:
    """The part of a call that these heads are, with `pattern` instead of its own."""
    device, number = request.q.device, request.q.shape[1]
    index = torch.tensor(heads, device=device)
    by_key = index // request.groups
    relative = None if request.relative is None else request.relative.of_heads(heads, number)
    return dataclasses.replace(
        request, q=request.q.index_select(1, index), k=request.k.index_select(1, by_key),
        v=request.v.index_select(1, by_key), pattern=pattern, relative=relative,
        score_mod=None if request.score_mod is None else _renumbered(request.score_mod, index),
    )  # fmt: skip


def _renumbered(score_mod: ScoreMod, heads: Tensor) -> ScoreMod:
    """`score_mod` for a call whose head h is head `heads[h]`."""
    return lambda score, b, h, q_idx, kv_idx: score_mod(score, b, heads[h], q_idx, kv_idx)
