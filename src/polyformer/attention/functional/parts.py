"""Attention over disjoint sets of pairs, each with its own queries and keys.

A position scheme may rotate the vectors of near pairs and of distant pairs by different angles. Each set of
pairs is then a call of `attend`, and the results are joined by log-sum-exp: one softmax over all keys.

A soft cap limits the scores of such calls, and a sink takes weight and has no value.
"""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyformer.attention.functional.attend import attend
from polyformer.attention.functional.splits import join_by_lse
from polyformer.attention.patterns.base import Pattern, ScoreMod
from polyformer.attention.patterns.mods import broadcasts
from polyformer.attention.patterns.score_steps import step
from polyformer.core.instrumentation import SINK, record_mark
from polyformer.core.ops.softmax import amend, record, recorded, recording, shares


class RotatedPart(NamedTuple):
    """The queries [B, H, Tq, D] and keys [B, Hkv, Tk, D] of a set of pairs; `pairs` None for all pairs.

    options: of `attend`, for these pairs instead of the options of the call.
    """

    q: Tensor
    k: Tensor
    pairs: Pattern | None = None
    options: Mapping[str, Any] | None = None


def attend_parts(parts: Sequence[RotatedPart], v: Tensor, pattern: Pattern | None, **options: Any) -> Tensor:
    """Return `attend` [B, H, Tq, Dv] over the pairs of all parts that the pattern allows.

    The sets of pairs must be disjoint. `options` are passed to `attend`.
    """
    if len(parts) == 1 and parts[0].pairs is None:
        return attend(parts[0].q, parts[0].k, v, pattern=pattern, **options)
    return attend_parts_with_lse(parts, v, pattern, **options)[0]


def attend_parts_with_lse(
    parts: Sequence[RotatedPart], v: Tensor, pattern: Pattern | None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Return `attend_parts`, and the log-sum-exp [B, H, Tq] of the scores of each query."""
    if len(parts) == 1 and parts[0].pairs is None:
        return attend(parts[0].q, parts[0].k, v, pattern=pattern, return_lse=True, **options)
    outs, lses, weights = [], [], []
    for q, k, pairs, own in parts:
        allowed = pattern if pairs is None else pairs if pattern is None else pattern & pairs
        with recorded() if recording() else contextlib.nullcontext([]) as weights_of_part:
            out, lse = attend(q, k, v, pattern=allowed, return_lse=True, **{**options, **(own or {})})
        weights += weights_of_part
        outs.append(out)
        lses.append(lse)
    y, total = join_by_lse(outs, lses)
    if weights:
        share_of_each = shares(torch.stack(lses, -1))[0].unsqueeze(-2).unbind(-1)
        record(sum((w * share for w, share in zip(weights, share_of_each)), torch.tensor(0)))
    return y, total


def soft_cap(cap: float) -> ScoreMod:
    """Return the function cap * tanh(score / cap), which limits scores to (-cap, cap) (Gemma 2)."""

    @step(f"soft cap: c tanh(score / c), c = {cap:g}")
    @broadcasts
    def limit(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return limit


def attend_with_sink(
    parts: Sequence[RotatedPart], v: Tensor, pattern: Pattern | None, sink: Tensor, **options: Any
) -> Tensor:
    """Return `attend_parts` [B, H, Tq, Dv] with an additional key of the score sink [H] and the value 0.

    With the sink's score s and the keys' log-sum-exp l, the keys have the share exp(l) / (exp(l) + exp(s)) of
    the weights. `options` are passed to `attend`.
    """
    out, lse = attend_parts_with_lse(parts, v, pattern, **options)
    share = torch.sigmoid(lse - sink.view(1, -1, 1)).unsqueeze(-1)  # [B, H, Tq, 1]
    record_mark(SINK, lambda: (1 - share).squeeze(-1), "queries")
    amend(lambda weights: weights * share.detach())
    return (out * share).to(out.dtype)
