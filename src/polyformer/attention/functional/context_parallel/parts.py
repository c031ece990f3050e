"""The parts of a call on a process: a call for each run of queries and each run of keys that they need."""

import dataclasses
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from polyformer.attention.functional.context_parallel.needs import Part
from polyformer.attention.functional.request import Request
from polyformer.attention.patterns.base import ScoreMod
from polyformer.attention.patterns.call_parts import pattern_in_part
from polyformer.attention.patterns.layout import Interval, intersect
from polyformer.attention.patterns.mods import broadcasts
from polyformer.core.sequence.context_parallel import slice_context

Compute = Callable[[Request], tuple[Tensor, Tensor]]
"""Function that computes a part: output [B, H, T, Dv] and log-sum-exp [B, H, T]."""


def part_request(request: Request, first: int, part: Part, span: Interval, k: Tensor, v: Tensor) -> Request:
    """Return the call of the queries of a part over the keys k, v of the slots `span`.

    first: the index of the first query of the part among the queries of the process.
    """
    whole, count, (key, _) = request.context.whole, part.queries[1] - part.queries[0], span
    assert whole is not None
    pattern, relative = request.pattern, request.relative
    if relative is not None and relative.content is not None:
        relative = dataclasses.replace(relative, content=relative.content[:, :, first : first + count])
    return dataclasses.replace(
        request,
        q=request.q[:, :, first : first + count],
        k=k,
        v=v,
        context=slice_context(whole, part.queries, span, k.device),
        pattern=None if pattern is None else pattern_in_part(pattern, whole, part.queries[0], key),
        relative=relative,
        score_mod=None if request.score_mod is None else _moved(request.score_mod, first, key),
    )


def _moved(score_mod: ScoreMod, query: int, key: int) -> ScoreMod:
    """Return `score_mod` for a part with query 0 at index `query` of the process and key 0 at slot `key`."""

    @broadcasts
    def moved(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score_mod(score, b, h, q_idx + query, kv_idx + key)

    return moved


def numbered(parts: Iterable[Part]) -> Iterable[tuple[int, Part]]:
    """Yield each part of a process with the index of its first query among the queries of the process."""
    first = 0
    for part in parts:
        yield first, part
        first += part.queries[1] - part.queries[0]


def keys_at(kv: Tensor, held: tuple[Interval, ...], span: Interval) -> Tensor:
    """Return the slots `span` of kv [B, Hkv, N, W], which has the slots `held`; zeros for missing slots."""
    # The index in kv at which each run of slots in `held` begins.
    starts, first = [], 0
    for start, stop in held:
        starts.append(first)
        first += stop - start
    pieces = [
        (max(start, span[0]), min(stop, span[1]), at + max(start, span[0]) - start)
        for (start, stop), at in zip(held, starts)
        if intersect(((start, stop),), (span,))
    ]
    # A single piece without gaps is a view: no copy.
    if [(start, stop) for start, stop, _ in pieces] == [span]:
        return kv.narrow(2, pieces[0][2], span[1] - span[0])
    there = torch.cat([torch.arange(a - span[0], b - span[0], device=kv.device) for a, b, _ in pieces])
    rows = torch.cat([kv.narrow(2, at, stop - start) for start, stop, at in pieces], 2)
    return rows.new_zeros(*kv.shape[:2], span[1] - span[0], kv.shape[3]).index_copy(2, there, rows)


def nothing_seen(request: Request, count: int, wide: bool = False) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of queries that may see no key.

    wide: both have float32 or more, for sums.
    """
    q, precise = request.q, torch.promote_types(request.q.dtype, torch.float32)
    out = q.new_zeros(*q.shape[:2], count, request.v.shape[3], dtype=precise if wide else q.dtype)
    return out, torch.full(out.shape[:3], -torch.inf, dtype=precise, device=q.device)
