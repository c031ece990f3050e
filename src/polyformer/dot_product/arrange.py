"""Calls that are easier as several: heads with their own patterns, parts of a pattern with their own steps.

What is left to a backend has one pattern for all heads, and where the pattern has a step, the tokens of each
residue class side by side. The oracle, `definition`, is never rearranged.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable

import torch
from torch import Tensor

from polyformer.dot_product.request import Request
from polyformer.dot_product.residue_classes import from_classes, in_classes
from polyformer.ops.softmax import safe_logsumexp
from polyformer.patterns.base import Pattern, ScoreMod
from polyformer.patterns.composition import And, Or, Without

PARTS = 8
"""A pattern with more alternatives than this is left whole."""

Run = Callable[[Request], tuple[Tensor, Tensor | None]]


def by_pattern(request: Request, together: bool) -> dict[Pattern, list[int]] | None:
    """The heads that share a pattern; None where all do.

    None also where the backend can compute them `together`: a key has one query head, no pattern has a step.
    """
    if request.pattern is None:
        return None
    groups: dict[Pattern, list[int]] = {}
    for head in range(request.q.shape[1]):
        groups.setdefault(request.pattern.of_head(head), []).append(head)
    if groups.keys() <= {request.pattern}:
        return None
    if together and request.groups == 1:
        each = [dataclasses.replace(request, pattern=one) for one in groups]
        return None if all(by_step(one) is None for one in each) else groups
    return groups


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
        request,
        q=request.q.index_select(1, index),
        k=request.k.index_select(1, by_key),
        v=request.v.index_select(1, by_key),
        pattern=pattern,
        relative=relative,
        score_mod=None if request.score_mod is None else _renumbered(request.score_mod, index),
    )


def _renumbered(score_mod: ScoreMod, heads: Tensor) -> ScoreMod:
    """`score_mod` for a call whose head h is head `heads[h]`."""
    return lambda score, b, h, q_idx, kv_idx: score_mod(score, b, heads[h], q_idx, kv_idx)


def by_step(request: Request) -> dict[int, Pattern] | None:
    """Disjoint parts of the pattern by their step; None where there is one part of step 1, or few queries."""
    if request.pattern is None:
        return None
    groups: dict[int, list[Pattern]] = {1: []}
    for one in alternatives(request.pattern):
        step = one.step()
        groups.setdefault(step if 2 * step <= request.context.q_len else 1, []).append(one)
    if len(groups) == 1:
        return None
    if not groups[1]:
        del groups[1]
    parts: dict[int, Pattern] = {}
    before: Pattern | None = None
    for step, members in groups.items():
        joined = functools.reduce(operator.or_, members)
        parts[step] = joined if before is None else Without(joined, before)
        before = joined if before is None else before | joined
    return parts


def alternatives(pattern: Pattern) -> list[Pattern]:
    """Patterns whose union is `pattern`, as it is written."""
    if isinstance(pattern, Or):
        return [*alternatives(pattern.left), *alternatives(pattern.right)]
    if isinstance(pattern, And):
        pairs = [one & two for one in alternatives(pattern.left) for two in alternatives(pattern.right)]
        return pairs if len(pairs) <= PARTS else [pattern]
    return [pattern]


def run_by_steps(parts: dict[int, Pattern], request: Request, run: Run) -> tuple[Tensor, Tensor]:
    """Every part in a call of its own, its tokens by residue class, joined by the log-sum-exps."""
    outs, sums = [], []
    for step, pattern in parts.items():
        part = dataclasses.replace(request, pattern=pattern)
        out, lse = run(part if step == 1 else in_classes(part, step))
        assert lse is not None, "parts are joined by it"
        outs.append(out if step == 1 else from_classes(out, request, step))
        sums.append(lse if step == 1 else from_classes(lse, request, step))
    return joined(outs, sums)


def joined(outs: list[Tensor], sums: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over several sets of keys, from outputs [B, H, T, D] and log-sum-exps [B, H, T] of each."""
    if len(outs) == 1:
        return outs[0], sums[0]
    each = torch.stack(sums, -1)
    total = safe_logsumexp(each)
    shares = torch.exp(each - total.masked_fill(total == -torch.inf, 0.0).unsqueeze(-1))
    out = sum(out * share.unsqueeze(-1) for out, share in zip(outs, shares.unbind(-1)))
    assert isinstance(out, Tensor)
    return out.to(outs[0].dtype), total
