"""The transfer of weights between models: matching weights are copied, and a report lists every tensor."""

import dataclasses
from collections.abc import Collection

import torch
from torch import Tensor

from polyformer.attention.positions import Position
from polyformer.models.architectures import Transformer
from polyformer.nn.heads import HeadConfig


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
    """
    stored = {name: tensor for name, tensor in old.state_dict().items() if name not in untrained}
    sources = {target: name for name in stored if (target := place(name, old.config.head, new.config.head))}
    own, offsets = dict(new.state_dict()), position_tables(new)
    fates: dict[str, list[str]] = {"copied": [], "extended": [], "cut": [], "newly_initialized": []}
    for name, tensor in own.items():
        source = stored.get(sources.get(name, ""))
        if source is not None and source.shape == tensor.shape:
            fate = "copied"
            tensor.copy_(source)
        elif source is not None and name in offsets and source.shape[1:] == tensor.shape[1:]:
            fate = "extended" if len(tensor) > len(source) else "cut"
            tensor.copy_(repeated(source, len(tensor), offsets[name]))
        else:
            fate = "newly_initialized"
        fates[fate].append(name)
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
