"""The mapping of a checkpoint's tensors to ours by a family's tables."""

import dataclasses
import fnmatch
import re
from collections.abc import Iterable, Mapping
from typing import Any

from polyformer.models.checkpoints.key_mapping import ENDINGS, Converter, Link, expanded, links
from polyformer.models.checkpoints.tables import FamilyTables
from polyformer.models.config import ModelConfig


class KeyConversion(FamilyTables):
    """The names of a family's tensors; the names for a task are the names of its class in transformers."""

    def full_key_mapping(self, task: str) -> dict[str, str | Converter]:
        """Return the key mapping of trunk and head of `task`."""
        wanted, base = self.tasks[task], self._base(task)
        trunk = wanted.trunk or self.key_mapping
        return expanded(
            {f"{base}{key}": target for key, target in trunk.items()}
            | {key.replace("{base}", base): target for key, target in wanted.key_mapping.items()}
        )

    def links(self, config: ModelConfig, task: str, own: Mapping[str, Any]) -> list[Link]:
        """Return the links between their tensors and ours, for a model with the tensors `own`.

        A tied model has no links for the tied keys, which files omit.
        """
        tied = self.tasks[task].tied_keys if self.tied(config) else ()
        # The tables of an encoder's family name the encoder, also for its classes that are a decoder.
        renamed = self.is_decoder(config)
        if renamed:
            own = {moved(name, "decoder", "encoder"): None for name in own}
        linked = links(self.full_key_mapping(task), own, self.layers(config), self.group_size(config))
        return [
            Link(link.theirs, (of_decoder(link.converter) if renamed else link.converter).for_config(config))
            for link in linked
            if link.theirs not in tied and self.has_tensor(config, task, link.theirs)
        ]

    def unused_key(self, task: str, key: str) -> str | None:
        """Return the name, in the class of `task`, of a tensor that the class does not use; else None."""
        patterns = [pattern.replace("{base}", self._base(task)) for pattern in self.tasks[task].unused_keys]
        return next((name for name in self._spellings(key) if _matches(name, patterns)), None)

    def ignores(self, key: str) -> bool:
        """Return whether a tensor has no weights."""
        return any(_matches(name, self.ignored_keys) for name in self._spellings(key))

    def expects(self, key: str) -> bool:
        """Return whether a tensor belongs to the family, though perhaps to another head."""
        patterns = [*self.ignored_keys]
        for name, task in self.tasks.items():
            keys, base = self.full_key_mapping(name), f"{task.base or self.base_model_prefix}."
            # A layer or an expert of any number.
            starred = [re.sub(r"\{[ije]\}", "*", known) for known in keys]
            patterns += [known + ending for known in starred for ending in ENDINGS]
            patterns += [*task.tied_keys, *(unused.replace("{base}", base) for unused in task.unused_keys)]
        return any(_matches(name, patterns) for name in self._spellings(key))

    def _base(self, task: str) -> str:
        """Return the prefix of the trunk's keys in the class of `task`."""
        base = self.tasks[task].base or self.base_model_prefix
        return f"{base}." if base and self.tasks[task].prefixed else ""

    @property
    def prefixes(self) -> tuple[str, ...]:
        """The prefixes of the trunk's keys in the family's classes, the family's own prefix first."""
        return tuple(
            dict.fromkeys((self.base_model_prefix, *(task.base for task in self.tasks.values() if task.base)))
        )

    def _spellings(self, key: str) -> tuple[str, ...]:
        """Return a key unchanged, with another of the trunk's prefixes and without a prefix."""
        return spellings(key, self.prefixes)


def spellings(key: str, prefixes: Iterable[str]) -> tuple[str, ...]:
    """Return a tensor's name unchanged, then with other prefixes of the trunk, and without a prefix."""
    # The file of a bare trunk has no prefix, classes with a head have the family's or their own.
    bases = [f"{prefix}." for prefix in prefixes]
    bare = next((key.removeprefix(base) for base in bases if key.startswith(base)), key)
    return key, *(base + key for base in bases), *(base + bare for base in bases), bare


def _matches(key: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)


def of_decoder(converter: Converter) -> Converter:
    """Return a converter for a decoder from a converter for an encoder."""
    ours = tuple(moved(name, "encoder", "decoder") for name in converter.ours)
    return dataclasses.replace(converter, ours=ours)


def moved(name: str, old: str, new: str) -> str:
    """Return the name of a tensor in another stack."""
    return new + name.removeprefix(old) if name.startswith(old) else name
