"""Scores of attention in a conversion: their options, and a scale that the new attention lacks."""

import dataclasses

import torch
from torch import nn

from polyformer.attention.mechanisms import AlternateConfig, SoftmaxConfig
from polyformer.attention.mechanisms.base import MechanismConfig
from polyformer.core.errors import InputError, caution, quote
from polyformer.core.ops.norms import CenteredRMSNorm
from polyformer.models.architectures import Transformer
from polyformer.models.checkpoints.transfer import Report
from polyformer.nn.stack import MultiHeadAttention, Stack


def with_score_options(mechanism: MechanismConfig, old: MechanismConfig) -> MechanismConfig:
    """Return `mechanism` with the scale of the `old` mechanism, its soft cap and its sink, if it has none.

    A mechanism without a softmax has no soft cap: a warning says so. `Report.left` names a sink.
    """
    if isinstance(mechanism, AlternateConfig):
        layers = tuple(with_score_options(layer, old) for layer in mechanism.mechanisms)
        return AlternateConfig(mechanisms=layers)
    if not isinstance(old, SoftmaxConfig):
        return mechanism
    if not isinstance(mechanism, SoftmaxConfig):
        if old.soft_cap is not None:
            kind, cap = quote(mechanism.kind), old.soft_cap
            caution(f"attention: {kind} has no soft cap, so the model loses its soft_cap={cap}")
        return mechanism
    missing = [name for name in ("scale", "soft_cap", "sink") if not getattr(mechanism, name)]
    return dataclasses.replace(mechanism, **{name: getattr(old, name) for name in missing})


@torch.no_grad()
def keep_scores(old: Transformer, new: Transformer, report: Report) -> Report:
    """Scale the query projections, or their norms, if only the old attention has its own scale.

    The new attention then divides by sqrt(D).

    Raises `InputError` if positions add to the queries: scaling the projection would not scale them.
    """
    names: list[str] = []
    for side in ("encoder", "decoder"):
        if getattr(old.config, side, None) is not None and getattr(new.config, side, None) is not None:
            names += _scale_queries(side, old.get_submodule(side), new.get_submodule(side), report)
    return dataclasses.replace(
        report,
        scaled=tuple(sorted(names)),
        copied=tuple(name for name in report.copied if name not in names),
    )


def _scale_queries(side: str, old: nn.Module, new: nn.Module, report: Report) -> list[str]:
    """Apply `keep_scores` to one stack and return the names of the scaled tensors."""
    assert isinstance(old, Stack)
    assert isinstance(new, Stack)
    names: list[str] = []
    for layer, module in enumerate(new.layers):
        scale = model_scale(old.mechanism.for_layer(layer))
        if scale is None or model_scale(new.mechanism.for_layer(layer)) is not None:
            continue
        attention = module.get_submodule("attention")
        assert isinstance(attention, MultiHeadAttention)
        # Q' = q s sqrt(D), because the new attention divides by sqrt(D).
        factor = scale * attention.head_size**0.5
        if factor == 1:
            continue
        if new.position.adds_to_queries:
            raise InputError(
                f"attention: {quote(new.mechanism.kind)} cannot have the model's scale {scale} with "
                f"positions that add to the queries; use 'softmax'"
            )
        # A norm of the queries undoes any factor before it.
        part = "query" if attention.query_norm is None else "query_norm"
        scaled = attention.get_submodule(part)
        # A centered weight is the factor of its channel minus 1.
        stored = 1.0 if isinstance(scaled, CenteredRMSNorm) else 0.0
        for name, parameter in scaled.named_parameters(f"{side}.layers.{layer}.attention.{part}"):
            if name in report.copied:
                parameter.add_(stored).mul_(factor).sub_(stored)
                names.append(name)
    return names


def model_scale(mechanism: MechanismConfig) -> float | None:
    """Return the scale of the products of queries and keys; None for 1 / sqrt(D)."""
    return mechanism.scale if isinstance(mechanism, SoftmaxConfig) else None
