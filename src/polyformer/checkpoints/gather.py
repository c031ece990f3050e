"""Our tensors made of those of a checkpoint, and what became of every one of them."""

import dataclasses
from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from polyformer.architecture import ModelConfig
from polyformer.checkpoints.family import Family
from polyformer.checkpoints.tensors import Tensors
from polyformer.core.errors import InputError, quote, unknown
from polyformer.core.initialization import initialize

Given = Tensors | dict[str, Tensor]


@dataclasses.dataclass(frozen=True, eq=False)
class Gathered:
    """weights: ours, by our names. fresh: the names of those that the files do not have. unused: theirs that
    no number depends on, by the names that they have in their class. left: the names of
    those of another head, which nothing here needs."""

    weights: dict[str, Tensor]
    fresh: tuple[str, ...]
    unused: dict[str, Tensor]
    left: tuple[str, ...]


def gather(
    family: Family, task: str, config: ModelConfig, given: Given, model: nn.Module, fresh_head: bool
) -> Gathered:
    """Our tensors of theirs. `fresh_head`: those of the head that are missing start fresh.

    Raises `InputError` for tensors that are missing, misshapen or of another family.
    """
    own = model.state_dict(keep_vars=True)
    links = {link.theirs: link for link in family.links(config, task, own)}
    copies = family.tasks[task].copies
    names = {settled(name, family.base, {*links, *copies}): name for name in given}
    weights: dict[str, Tensor] = {}
    sources: dict[str, str] = {}
    unused: dict[str, Tensor] = {}
    missing: list[str] = []
    for theirs, link in links.items():
        stored = next((one for one in (theirs, *_copies(copies, theirs)) if one in names), None)
        if stored is None:
            missing.append(theirs)
            continue
        value = given[names.pop(stored)]
        parts = link.part.split(value)
        if not parts:
            unused[theirs] = value
        for name, one in zip(link.part.ours, parts):
            _check_shape(stored, name, one, own[name])
            if name in sources:  # two of theirs for one of ours: an untied class reads the later alone
                unused[sources[name]] = weights[name]
            weights[name], sources[name] = one.contiguous(), theirs
    weights |= family.made(own)
    left: list[str] = []
    for name, stored in names.items():
        kept = family.unused_key(task, name) if name not in copies else None
        if kept is not None:
            unused[kept] = given[stored]
        elif not family.expects(name):
            raise unknown("tensor in the checkpoint", name, family.table(task))
        elif name not in copies and not family.ignores(name):
            left.append(stored)
    without = [name for name in own if name not in weights and not _shared(own, name, weights)]
    fresh = tuple(name for name in without if fresh_head and name.startswith("head."))
    if len(fresh) < len(without):
        raise InputError(
            f"the checkpoint lacks {', '.join(missing[:4]) or 'tensors'} "
            f"({len(without) - len(fresh)} of the model's tensors in all)"
        )
    if fresh:
        made = _fresh_head(config, next(iter(weights.values())).dtype)
        weights |= {name: made[name] for name in fresh}
    return Gathered(weights, fresh, unused, tuple(left))


def settled(name: str, base: str, expected: Collection[str]) -> str:
    """A tensor's name in files of this task, whether its own file has the trunk's prefix or not."""
    candidates = (name, f"{base}.{name}", name.removeprefix(f"{base}."))
    return next((one for one in candidates if one in expected), name)


def _copies(copies: Mapping[str, str], name: str) -> list[str]:
    return [copy for copy, of in copies.items() if of == name]


def _check_shape(theirs: str, name: str, one: Tensor, own: Tensor) -> None:
    if one.shape != own.shape:
        raise InputError(
            f"the checkpoint's {quote(theirs)} makes {quote(name)} of shape {tuple(one.shape)}, and "
            f"config.json of shape {tuple(own.shape)}; they are not of one model"
        )


def _shared(own: Mapping[str, Tensor], name: str, found: Mapping[str, Tensor]) -> bool:
    """Whether a tensor is also one of those found, under another name."""
    return any(own[one] is own[name] for one in found)


def _fresh_head(config: ModelConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    holder = nn.Module()
    holder.head = config.head.build(config.head_shape())
    initialize(holder, config.initializer_range)
    return dict(holder.to(dtype).state_dict())
