"""The conversion of a checkpoint's tensors to ours, with a record of every tensor."""

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor, nn

from polyformer.core.errors import InputError, quote, unknown
from polyformer.models.checkpoints.family import Family
from polyformer.models.checkpoints.gguf_tensors import GgufTensors
from polyformer.models.checkpoints.key_conversion import spellings
from polyformer.models.checkpoints.key_mapping import Link, Part
from polyformer.models.checkpoints.tensors import Tensors
from polyformer.models.config import ModelConfig
from polyformer.models.initialization import initialize

# A checkpoint's tensors by their names.
Stored = Tensors | GgufTensors | dict[str, Tensor]


@dataclasses.dataclass(frozen=True, eq=False)
class MatchedTensors:
    """The tensors that a model takes from a checkpoint."""

    weights: dict[str, Tensor]  # ours, by our names
    newly_initialized: tuple[str, ...]  # names of ours that the checkpoint lacks
    unused: dict[str, Tensor]  # theirs without effect on the outputs, by their names in their class
    left: tuple[str, ...]  # names of theirs of another head


def match_tensors(
    family: Family, task: str, config: ModelConfig, stored: Stored, model: nn.Module, new_head: bool
) -> MatchedTensors:
    """Return the tensors of `model`, from a checkpoint of the family's `task`.

    new_head: whether tensors of the head that the checkpoint lacks are newly initialized. Raises `InputError`
    for tensors that are missing, misshapen or of another family.
    """
    own = model.state_dict(keep_vars=True)
    links = {link.theirs: link for link in family.links(config, task, own)}
    tied = family.tasks[task].tied_keys
    # `keys` shrinks to the tensors that no link has taken.
    keys = {resolve_prefix(key, family.prefixes, {*links, *tied}): key for key in stored}
    weights, unused, missing = _convert(links, tied, keys, stored, own)
    weights |= family.generated_tensors(own)
    numbered = {_without_numbers(theirs) for theirs in links} if keys else set()
    left: list[str] = []
    for name, key in keys.items():
        unused_key = family.unused_key(task, name) if name not in tied else None
        if unused_key is not None:
            unused[unused_key] = stored[key]
        elif not family.expects(name):
            raise unknown("tensor in the checkpoint", name, family.full_key_mapping(task))
        elif name not in tied and not family.ignores(name):
            if _without_numbers(name) in numbered:
                raise InputError(
                    f"the checkpoint has {quote(key)}, and config.json describes a model of fewer layers or "
                    "parts; they belong to different models"
                )
            left.append(key)
    held = {id(own[name]) for name in weights}  # a tied tensor has a second name
    absent = [name for name in own if name not in weights and id(own[name]) not in held]
    # Only a head may be new: a trunk with gaps belongs to another model.
    new = tuple(name for name in absent if new_head and name.startswith("head."))
    if len(new) < len(absent):
        raise InputError(
            f"the checkpoint lacks {', '.join(missing[:4]) or 'tensors'} "
            f"({len(absent) - len(new)} of the model's tensors in all)"
        )
    if new:
        # In the type of the checkpoint, which may be half precision.
        head = _new_head(config, next(iter(weights.values())).dtype)
        weights |= {name: head[name] for name in new}
    return MatchedTensors(weights, new, unused, tuple(left))


def _convert(
    links: Mapping[str, Link],
    tied: Mapping[str, str],
    keys: dict[str, str],
    stored: Stored,
    own: Mapping[str, Tensor],
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    """Return our, unused and missing tensors; remove the used names from `keys`."""
    weights: dict[str, Tensor] = {}
    sources: dict[str, str] = {}
    unused: dict[str, Tensor] = {}
    missing: list[str] = []
    parts: dict[str, list[Tensor]] = {}
    for theirs, link in links.items():
        # Files of untied classes may contain only the copy.
        copies = (copy for copy, source in tied.items() if source == theirs)
        key = next((name for name in (theirs, *copies) if name in keys), None)
        if key is None:
            missing.append(theirs)
            continue
        value = stored[keys.pop(key)]
        converted = link.converter.split(value)
        if not converted:
            unused[theirs] = value
        for name, tensor in zip(link.converter.ours, converted):
            if isinstance(link.converter, Part):
                _check_shape(key, name, tensor, link.converter.join([own[name]]))
                parts.setdefault(name, []).append(tensor)
                if len(parts[name]) < link.converter.count:
                    continue
                tensor = torch.cat(parts[name])
            _check_shape(key, name, tensor, own[name])
            if name in sources:  # two of theirs for one of ours: an untied class only reads the latter
                unused[sources[name]] = weights[name]
            weights[name], sources[name] = tensor.contiguous(), theirs
    return weights, unused, missing


def _without_numbers(name: str) -> str:
    """Return a tensor's name without the numbers of layers and experts, which have further names."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "#", name)


def resolve_prefix(key: str, prefixes: Iterable[str], expected: Collection[str]) -> str:
    """Return a tensor's name in the files of a task, for any prefix of the trunk in its own file, or none."""
    return next((name for name in spellings(key, prefixes) if name in expected), key)


def _check_shape(theirs: str, name: str, tensor: Tensor, own: Tensor) -> None:
    if tensor.shape != own.shape:
        raise InputError(
            f"the checkpoint's {quote(theirs)} makes {quote(name)} of shape {tuple(tensor.shape)}, and "
            f"config.json requires shape {tuple(own.shape)}; they belong to different models"
        )


def _new_head(config: ModelConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    holder = nn.Module()
    holder.head = config.head.build(config.head_shape())
    initialize(holder, config.initializer_range)
    return dict(holder.to(dtype).state_dict())
