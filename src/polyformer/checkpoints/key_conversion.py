"""A family's tables of tensors at work: which tensor of a checkpoint holds which of ours."""

import dataclasses
import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any

from polyformer.architecture import ModelConfig
from polyformer.checkpoints.key_mapping import ENDINGS, Converter, Link, links
from polyformer.checkpoints.tables import FamilyTables


class KeyConversion(FamilyTables):
    """Names of tensors of a family; those of a task are those of its class in transformers."""

    def full_key_mapping(self, task: str) -> dict[str, str | Converter]:
        """The key mapping of trunk and head of `task`."""
        wanted, base = self.tasks[task], self._base(task)
        trunk = wanted.trunk or self.key_mapping
        return {f"{base}{key}": target for key, target in trunk.items()} | {
            key.replace("{base}", base): target for key, target in wanted.key_mapping.items()
        }

    def links(self, config: ModelConfig, task: str, own: Mapping[str, Any]) -> list[Link]:
        """Which of their tensors holds which of ours, for a model with the tensors `own`.

        Of a tied model without the tied keys, which files leave out.
        """
        tied = self.tasks[task].tied_keys if self.tied(config) else ()
        if self.tasks[task].causal:
            own = {moved(name, "decoder", "encoder"): None for name in own}
        written_out = links(self.full_key_mapping(task), own, self.layers(config))
        if self.tasks[task].causal:
            written_out = (Link(link.theirs, of_decoder(link.converter)) for link in written_out)
        return [link for link in written_out if link.theirs not in tied]

    def unused_key(self, task: str, key: str) -> str | None:
        """The name in the class of `task` of a tensor that it computes nothing with; None for any other."""
        patterns = [pattern.replace("{base}", self._base(task)) for pattern in self.tasks[task].unused_keys]
        return next((name for name in self._spellings(key) if _matches(name, patterns)), None)

    def ignores(self, key: str) -> bool:
        """Whether a tensor holds no weights."""
        return any(_matches(name, self.ignored_keys) for name in self._spellings(key))

    def expects(self, key: str) -> bool:
        """Whether a tensor belongs to the family, though perhaps to another head."""
        patterns = [*self.ignored_keys]
        for name, task in self.tasks.items():
            keys, base = self.full_key_mapping(name), f"{task.base or self.base_model_prefix}."
            patterns += [known.replace("{i}", "*") + ending for known in keys for ending in ENDINGS]
            patterns += [*task.tied_keys, *(unused.replace("{base}", base) for unused in task.unused_keys)]
        return any(_matches(name, patterns) for name in self._spellings(key))

    def _base(self, task: str) -> str:
        """What the trunk's keys begin with in the class of `task`."""
        base = self.tasks[task].base or self.base_model_prefix
        return f"{base}." if base and self.tasks[task].prefixed else ""

    @property
    def prefixes(self) -> tuple[str, ...]:
        """What the trunk's keys begin with in the family's classes, the family's own prefix first."""
        return tuple(
            dict.fromkeys((self.base_model_prefix, *(task.base for task in self.tasks.values() if task.base)))
        )

    def _spellings(self, key: str) -> tuple[str, ...]:
        """A key as it is, with another of the trunk's prefixes and without one."""
        return spellings(key, self.prefixes)


def spellings(key: str, prefixes: Iterable[str]) -> tuple[str, ...]:
    """A tensor's name as it is, then as files have it whose trunk stands under another prefix, or none."""
    bases = [f"{prefix}." for prefix in prefixes]
    bare = next((key.removeprefix(base) for base in bases if key.startswith(base)), key)
    return key, *(base + key for base in bases), *(base + bare for base in bases), bare


def _matches(key: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)


def of_decoder(converter: Converter) -> Converter:
    """A converter of an encoder's tensors for a decoder."""
    ours = tuple(moved(name, "encoder", "decoder") for name in converter.ours)
    return dataclasses.replace(converter, ours=ours)


def moved(name: str, old: str, new: str) -> str:
    """The name of one stack's tensor as the other's."""
    return new + name.removeprefix(old) if name.startswith(old) else name
