"""The transfer of weights between models: matching weights are copied, and a report lists every tensor.

A conversion keeps the scores of attention: their options, and a scale that the new attention lacks.
"""

import dataclasses
from collections.abc import Collection

import torch
from torch import Tensor, nn

from polyformer.attention.mechanisms import AlternateConfig, SoftmaxConfig
from polyformer.attention.mechanisms.base import MechanismConfig
from polyformer.attention.positions import Position
from polyformer.core.errors import InputError, caution, quote
from polyformer.core.ops.norms import CenteredRMSNorm
from polyformer.models.architectures import Transformer
from polyformer.models.architectures.weights import load_weights
from polyformer.nn.heads import HeadConfig
from polyformer.nn.stack import MultiHeadAttention, Stack


@dataclasses.dataclass(frozen=True)
class Report:
    """Names of the new model's tensors by their origin.

    copied: equal to the old tensors. scaled: multiplied by a number, so that attention scores are unchanged.
    extended: tables of positions, the old rows repeated. cut: tables of positions, the first rows.
    newly_initialized: not from the old model. left: names of the old model's tensors without a place in the
    new model.
    """

    copied: tuple[str, ...]
    scaled: tuple[str, ...]
    extended: tuple[str, ...]
    cut: tuple[str, ...]
    newly_initialized: tuple[str, ...]
    left: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"copied: {len(self.copied)} tensors"]
        for fate in ("scaled", "extended", "cut", "newly_initialized", "left"):
            names = ", ".join(grouped(getattr(self, fate)))
            lines.append(f"{fate.replace('_', ' ')}: {names or 'none'}")
        return "\n".join(lines)


@torch.no_grad()
def transfer(old: Transformer, new: Transformer, untrained: Collection[str] = ()) -> Report:
    """Copy the matching tensors of `old` into `new`, with tables of positions repeated or cut to their
    length.

    Heads of different kinds share some modules, which are copied, for example a pooler
    (`HeadConfig.reusable_modules`).
    `untrained`: names of tensors of the old model that came from no checkpoint, which are not copied.

    A `new` model without values, on the device `meta`, takes over the tensors of `old` if it needs no others,
    so that the weights are not in memory twice. Otherwise it stays without values.
    """
    stored = {name: tensor for name, tensor in old.state_dict().items() if name not in untrained}
    sources = {target: name for name in stored if (target := place(name, old.config.head, new.config.head))}
    own, offsets = dict(new.state_dict()), position_tables(new)
    fates: dict[str, list[str]] = {"copied": [], "extended": [], "cut": [], "newly_initialized": []}
    values: dict[str, Tensor] = {}
    for name, tensor in own.items():
        source = stored.get(sources.get(name, ""))
        if source is not None and source.shape == tensor.shape:
            fate = "copied"
            values[name] = source
        elif source is not None and name in offsets and source.shape[1:] == tensor.shape[1:]:
            fate = "extended" if len(tensor) > len(source) else "cut"
            values[name] = repeated(source, len(tensor), offsets[name])
        else:
            fate = "newly_initialized"
        fates[fate].append(name)
    if not any(tensor.is_meta for tensor in own.values()):
        for name, value in values.items():
            own[name].copy_(value)
    elif not fates["newly_initialized"]:
        typed = {name: value.to(own[name].dtype) for name, value in values.items()}
        load_weights(new, typed, "the checkpoint")
    used = {sources[name] for fate in ("copied", "extended", "cut") for name in fates[fate]}
    left = [*(name for name in stored if name not in used), *old.unused_tensors]
    return Report(
        scaled=(), left=tuple(sorted(left)), **{fate: tuple(sorted(names)) for fate, names in fates.items()}
    )


def place(name: str, old: HeadConfig, new: HeadConfig) -> str | None:
    """Return the name of a tensor of a model with the `old` head in a model with the `new` head, or None."""
    if not name.startswith("head.") or old.kind == new.kind:
        return name
    parts = new.reusable_modules()
    for part, path in old.reusable_modules().items():
        # A pooler, for example, has another path in another kind of head.
        start = f"head.{path}." if path else "head."
        if part in parts and name.startswith(start):
            return ".".join(filter(None, ("head", parts[part], name.removeprefix(start))))
    return None


def position_tables(model: Transformer) -> dict[str, int]:
    """Return the tables with a row for each position, by name, with the number of rows before them."""
    return {
        f"{path}.{name}": offset
        for path, module in model.named_modules()
        if isinstance(module, Position)
        for name, offset in module.position_tables().items()
    }


def repeated(table: Tensor, length: int, offset: int) -> Tensor:
    """Return a table [offset + n, E] as [length, E], its n positions repeated."""
    first, positions = table[:offset], table[offset:]
    # Rounded up; the last repetition is cut.
    times = -(-(length - offset) // len(positions))
    return torch.cat([first, positions.repeat(times, 1)])[:length].clone()


def grouped(names: tuple[str, ...]) -> list[str]:
    """Return names with the layer's number as "*": "encoder.layers.*.attention.query.weight (12)"."""
    groups: dict[str, list[str]] = {}
    for name in names:
        pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
        groups.setdefault(pattern, []).append(name)
    return [f"{pattern} ({len(group)})" if len(group) > 1 else group[0] for pattern, group in groups.items()]


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
