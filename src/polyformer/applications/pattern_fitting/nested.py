"""The outputs of many patterns from the same weights, each from the largest pattern that it contains.

With the keys S of a pattern and B, a subset of S, the keys of another,

    sum_{j in S} p_ij v_j = sum_{j in B} p_ij v_j + sum_{j in S - B} p_ij v_j

so windows of many widths cost little more than the widest. Nothing is subtracted, so nothing cancels.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from polyformer.applications.pattern_fitting.candidates import pair_masks
from polyformer.attention.patterns import Pattern
from polyformer.core.sequence.context import Context


@dataclasses.dataclass(frozen=True)
class QueryRun:
    """The queries start <= i < stop, each for `weight` queries of the text."""

    start: int
    stop: int
    weight: float = 1.0


@dataclasses.dataclass(frozen=True, eq=False)
class NestedStep:
    """The keys [K] that a pattern adds to the keys of `base`, and the queries that see them, `mask` [R, K].

    base: an index into the list of patterns; None for no keys.
    """

    base: int | None
    keys: Tensor
    mask: Tensor


def nested_steps(
    patterns: Sequence[Pattern], context: Context, runs: Sequence[QueryRun]
) -> list[list[NestedStep]]:
    """Return the step of each pattern in every run."""
    return [
        _steps([pair_masks(pattern, context, torch.arange(run.start, run.stop)) for pattern in patterns])
        for run in runs
    ]


def _steps(masks: Sequence[Tensor]) -> list[NestedStep]:
    """Return the step of each mask [R, K] from the largest earlier mask that it contains."""
    sizes, steps = [int(mask.sum()) for mask in masks], list[NestedStep]()
    for number, mask in enumerate(masks):
        base, rest = None, mask
        for other in sorted(range(number), key=lambda index: -sizes[index]):
            if not bool((masks[other] & ~mask).any()):
                base, rest = other, mask & ~masks[other]
                break
        keys = rest.any(0).nonzero().flatten()
        steps.append(NestedStep(base, keys, rest[:, keys]))
    return steps


def nested_outputs(weights: Tensor, v: Tensor, steps: Sequence[NestedStep]) -> list[tuple[Tensor, Tensor]]:
    """Return the output [H, R, D] and mass [H, R] of each pattern; weights: [H, R, K], v: [H, K, D]."""
    sums = list[tuple[Tensor, Tensor]]()
    for step in steps:
        keys = step.keys.to(v.device)
        kept = weights[..., keys] * step.mask.to(v.device)
        output, mass = kept @ v[:, keys], kept.sum(-1)
        if step.base is not None:
            output, mass = output + sums[step.base][0], mass + sums[step.base][1]
        sums.append((output, mass))
    return [(x / mass.clamp_min(torch.finfo(mass.dtype).tiny).unsqueeze(-1), mass) for x, mass in sums]
