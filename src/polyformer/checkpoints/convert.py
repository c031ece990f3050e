"""A trained model with another attention: what fits is copied, positions are repeated, the rest starts fresh.

The attention matrix of a sparse pattern is the dense one with entries left out, so all its weights are there
already, and where the pattern covers the text nothing changes. Learned positions are repeated from their
start, and global tokens' projections begin as the ordinary ones: Beltagy et al. 2020 (Longformer), section 5.
What mechanisms have beyond queries, keys and values (Linformer's projections, say) is fresh.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from polyformer.architecture import ModelConfig
from polyformer.attention import Pattern, SoftmaxConfig
from polyformer.core.errors import InputError
from polyformer.core.mechanism import MechanismConfig
from polyformer.model import Transformer
from polyformer.stack import StackConfig, copy_local_projections


@dataclasses.dataclass(frozen=True)
class Report:
    """Names of the new model's tensors by what became of them; `left`: those of the old without a place."""

    copied: tuple[str, ...]
    extended: tuple[str, ...]
    fresh: tuple[str, ...]
    left: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"copied: {len(self.copied)} tensors"]
        for what in ("extended", "fresh", "left"):
            names = getattr(self, what)
            lines.append(f"{what}: {', '.join(summed(names)) or 'none'}")
        return "\n".join(lines)


def convert(model: Transformer, attention: Pattern | MechanismConfig | str | dict[str, Any] | None = None, *,
            max_positions: int | None = None, global_projections: bool = False,
            ) -> tuple[Transformer, Report]:  # fmt: skip
    """A new model, in evaluation mode, and what became of the weights of `model`, which stays as it is.

    Args:
        attention: a pattern or a mechanism, in any of the ways of `polyformer.presets.model_config`, for the
            encoder where there is one, else for the decoder.
        max_positions: how long a text the new one takes; learned positions are repeated.
        global_projections: give global tokens projections of their own, copied from the ordinary ones.

    Raises:
        InputError: a mechanism that the model cannot have, fewer positions than before.
    """
    config = converted(model.config, read_attention(attention), max_positions, global_projections)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # what is fresh is the same every time
        made = Transformer(config)
    report = transfer(model, made.to(next(model.parameters()).dtype))
    if global_projections:
        copy_local_projections(made)
        same = tuple(name for name in report.fresh if ".global_attention." in name)
        report = dataclasses.replace(
            report, copied=(*report.copied, *same),
            fresh=tuple(name for name in report.fresh if name not in same),
        )  # fmt: skip
    return made.eval(), report


def read_attention(given: object) -> Pattern | MechanismConfig | None:
    """The pattern or the mechanism that is meant, by an expression such as `Window(256) | Global(1)` or
    `linformer(k=128)`, by a mapping or by itself; `InputError` for anything else."""
    if given is None:
        return None
    return Pattern.meant(given) or MechanismConfig.from_dict(given, "attention")


@torch.no_grad()
def transfer(old: Transformer, new: Transformer) -> Report:
    """Copies into `new` what `old` has under the same name and of the same shape, positions repeated.

    Of the head only where both have one of the same kind.
    """
    given, own = dict(old.state_dict()), dict(new.state_dict())
    alike = old.config.head.kind == new.config.head.kind
    sides = ((side, getattr(new.config, side)) for side in ("encoder", "decoder"))
    offsets = {
        f"{side}.position.tables.0.weight": getattr(stack.position, "offset", 0)
        for side, stack in sides
        if stack is not None
    }
    copied, extended = [], []
    for name in own.keys() & given.keys():
        if name.startswith("head.") and not alike:
            continue
        if given[name].shape == own[name].shape:
            own[name].copy_(given[name])
            copied.append(name)
        elif name in offsets and given[name].shape[1:] == own[name].shape[1:]:
            own[name].copy_(repeated(given[name], len(own[name]), offsets[name]))
            extended.append(name)
    kept = {*copied, *extended}
    fresh, left = ([name for name in some if name not in kept] for some in (own, given))
    return Report(*(tuple(sorted(names)) for names in (copied, extended, fresh, left)))


def converted(config: ModelConfig, attention: Pattern | MechanismConfig | None, max_positions: int | None,
              global_projections: bool) -> ModelConfig:  # fmt: skip
    """The configuration of the new model; it is no longer of the family that it came from."""
    side = "encoder" if config.encoder is not None else "decoder"
    stack: StackConfig = getattr(config, side)
    mechanism = stack.attention.mechanism
    if isinstance(attention, Pattern):
        if not isinstance(mechanism, SoftmaxConfig):
            mechanism = SoftmaxConfig()
        mechanism = dataclasses.replace(mechanism, pattern=attention)
    elif attention is not None:
        mechanism = attention
    inner = dataclasses.replace(
        stack.attention, mechanism=mechanism,
        global_projections=global_projections or stack.attention.global_projections,
    )  # fmt: skip
    before, origin = config.max_position_embeddings, config.origin
    if max_positions is not None and max_positions < before:
        raise InputError(
            f"max_positions: expected {before}, which the model has, or more, got {max_positions}"
        )
    changed = {side: dataclasses.replace(stack, attention=inner)}
    if changed[side] != stack:
        origin = None
    return dataclasses.replace(
        config, **changed, max_position_embeddings=max_positions or before, origin=origin
    )


def repeated(table: Tensor, length: int, offset: int) -> Tensor:
    """A table [offset + n, E] as [length, E], its n positions over and over."""
    first, positions = table[:offset], table[offset:]
    times = -(-(length - offset) // len(positions))
    return torch.cat([first, positions.repeat(times, 1)])[:length].clone()


def summed(names: tuple[str, ...]) -> list[str]:
    """Names with the layers' numbers taken together: "encoder.layers.*.attention.query.weight (12)"."""
    groups: dict[str, list[str]] = {}
    for name in names:
        pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
        groups.setdefault(pattern, []).append(name)
    return [f"{pattern} ({len(group)})" if len(group) > 1 else group[0] for pattern, group in groups.items()]
