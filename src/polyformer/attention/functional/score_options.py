"""Two options of softmax attention: a limit of the scores, and a sink that takes weight and has no value."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polyformer.attention.functional.parts import RotatedPart, attend_parts_with_lse
from polyformer.attention.patterns.base import Pattern, ScoreMod
from polyformer.attention.patterns.mods import broadcasts
from polyformer.attention.patterns.score_steps import step
from polyformer.core.instrumentation import SINK, record_mark
from polyformer.core.ops.softmax import amend


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
