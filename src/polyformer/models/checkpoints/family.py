"""A family of public models: its tables, the conversion of configurations and tensors by them, the registry.

One file of `families/` defines the tables of one family: its configuration, its tensors and its heads. They
are read in both directions: one to load, the other to save. A saved configuration is read again and compared,
so that a model that its family cannot represent is refused.
"""

import dataclasses
import fnmatch
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, ClassVar

from torch import Tensor

from polyformer.core.errors import InputError, quote, unknown
from polyformer.core.registry import Registry
from polyformer.models.architectures import Transformer
from polyformer.models.checkpoints.config_mapping import (
    PROBLEM,
    Option,
    Tree,
    check_required,
    differences,
    read_options,
    write_options,
)
from polyformer.models.checkpoints.key_mapping import ENDINGS, Converter, KeyMapping, Link, expanded, links
from polyformer.models.checkpoints.values import check_values, usual_aliases
from polyformer.models.config import ModelConfig, OriginConfig
from polyformer.nn.heads import HeadConfig


@dataclasses.dataclass(frozen=True)
class Task:
    """A class of transformers: the trunk of its family with a head."""

    head: HeadConfig
    # the head's tensors; {base} is the trunk's prefix
    key_mapping: KeyMapping = dataclasses.field(default_factory=dict)
    config_mapping: tuple[Option, ...] = ()  # options of the head, by paths in it
    # tensors that repeat others if the embeddings are tied, each with the name of the original
    tied_keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    prefixed: bool = True  # the trunk's tensors have the family's prefix
    base: str = ""  # this class's prefix, if it differs from the family's
    labelled: bool = True  # number of labels and dropout come from the configuration
    without: str = ""  # the stack that this class lacks, "encoder" or "decoder"
    trunk: KeyMapping | None = None  # the trunk's key mapping if it differs from the family's
    unused_keys: tuple[str, ...] = ()  # patterns of tensors that the class has but does not use
    # options with another value in this class than in the family
    required: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    causal: bool = False  # the family's encoder is a decoder in this class

    def covers(self, option: Option) -> bool:
        """Return whether an option describes a part that this class has."""
        return any(path.split(".")[0] != self.without for path in option.ours)


class FamilyTables:
    """The tables of a family, as class attributes, and the functions for all that a table cannot express."""

    # The classes of transformers, by the end of their name.
    model_type: ClassVar[str]
    class_prefix: ClassVar[str]  # the start of their names
    tasks: ClassVar[Mapping[str, Task]]
    base_model_prefix: ClassVar[str] = ""  # of the trunk's tensors, "" for none
    removed: ClassVar[str] = ""  # the first version of transformers without the family, "" for none
    outside: ClassVar[bool] = False  # whether its code is with its files on the Hub, not in transformers
    paper: ClassVar[str]
    objective: ClassVar[str]

    # The configuration.
    template: ClassVar[ModelConfig]  # a model of the family, in which the options are set
    config_mapping: ClassVar[tuple[Option, ...]]  # options that are ours under another name
    aliases: ClassVar[Mapping[str, str]] = {}  # other names of options, in addition to `usual_aliases`
    required: ClassVar[Mapping[str, Any]] = {}  # options with a single supported value
    other_options: ClassVar[Mapping[str, Any]] = {}  # of `read_other_options`, with their defaults
    ignored_options: ClassVar[tuple[str, ...]] = ()  # without effect on the outputs
    image_options: ClassVar[tuple[str, ...]] = ()  # in preprocessor_config.json, not in config.json
    head_dropouts: ClassVar[tuple[str, ...]] = ()  # dropout of a labelled head: the first that is set counts
    num_labels: ClassVar[int] = 2  # the default

    # The tensors.
    key_mapping: ClassVar[KeyMapping]  # the trunk's
    ignored_keys: ClassVar[tuple[str, ...]] = ()  # patterns of tensors without weights

    # Our side.
    sizes: ClassVar[tuple[str, ...]] = ()  # the presets
    claims: ClassVar[bool] = True  # False: another family has the same models, and is saved by default
    model: ClassVar[type[Any]] = Transformer  # built from the template's configuration

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # Sizes have the same usual names in all families.
        if "config_mapping" in vars(cls):
            cls.aliases = {**usual_aliases(cls.config_mapping), **cls.aliases}

    def check(self, hub: Tree) -> None:
        """Raise `InputError` for options that this family does not support, beyond `required`.

        hub: their configuration with all defaults, here and in `read_other_options`.
        """

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set in our `tree` the options of their `hub` that the config mapping cannot express."""

    def write_other_options(self, tree: Tree) -> Tree:
        """Return the entries of their configuration for our `tree`, the inverse of `read_other_options`."""
        return {}

    def fitted(self, config: ModelConfig, stored: Collection[str]) -> ModelConfig:
        """Return `config` adjusted to the names of tensors in its files, beyond config.json."""
        return config

    def generated_tensors(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors among ours, `own`, that no public file contains: the seeds of random numbers."""
        return {}

    def usual_key(self, key: str) -> str:
        """Return the name of a tensor in our table, of a name that some files have instead."""
        return key

    def has_tensor(self, config: ModelConfig, task: str, theirs: str) -> bool:
        """Return whether files of a model have a tensor, if the table relates several to one of ours."""
        return True

    def is_decoder(self, config: ModelConfig) -> bool:
        """Return whether a model of an encoder's family is a decoder."""
        return (
            getattr(self.template, "decoder", None) is None and getattr(config, "decoder", None) is not None
        )

    def layers(self, config: ModelConfig) -> int:
        """Return the number of layers of the deepest stack."""
        stacks = (getattr(config, side, None) for side in ("encoder", "decoder"))
        return max(stack.num_hidden_layers for stack in stacks if stack is not None)

    def group_size(self, config: ModelConfig) -> int:
        """Return the number of our layers that share one number in the names of public files."""
        return 1

    def tied(self, config: ModelConfig) -> bool:
        """Return whether the output layer is tied to the token table."""
        # models of images and of trajectories predict no tokens and have no token table
        return hasattr(config, "embedding") and config.embedding.tied


class ConfigConversion(FamilyTables):
    """The conversion of a family's configurations, and of models to its classes."""

    def config(self, hub: Tree, task: str, head: HeadConfig | None = None) -> ModelConfig:
        """Return our configuration for theirs; `head` replaces the head that `hub` describes."""
        # Transformers accepts several names for one size.
        hub = {self.aliases.get(name, name): value for name, value in hub.items()}
        check_values(hub)
        wanted = self.tasks[task]
        check_required({**self.required, **wanted.required}, hub)
        defaults = {option.theirs: option.default for option in self.config_mapping}
        full = {**defaults, **self.other_options, **hub}
        self.check(full)
        tree = self.template.to_dict()
        tree["head"] = (head or wanted.head).to_dict()
        read_options(self.config_mapping, hub, tree)
        self.read_other_options(tree, full)
        # The same tensors, read as a decoder.
        if wanted.causal:
            tree["encoder"], tree["decoder"] = None, tree["encoder"]
        if wanted.without:
            tree[wanted.without] = None
        if head is None:
            read_options(wanted.config_mapping, hub, tree["head"])
            self._read_labels(wanted, hub, tree["head"])
        # All other fields are kept in `origin`, and saving writes them back.
        options = (*self.config_mapping, *wanted.config_mapping)
        read = {option.theirs for option in options if wanted.covers(option)}
        read |= {*self.required, *self.other_options, "architectures"}
        tree["origin"] = OriginConfig(
            model_type=self.model_type,
            architecture=self.class_prefix + task,
            fields={name: value for name, value in hub.items() if name not in read},
        ).to_dict()
        return type(self.template).from_dict(tree)

    def hub_config(self, config: ModelConfig) -> tuple[Tree, str]:
        """Return their configuration for ours, and the task; raise `InputError` if they lack such models."""
        task = self.task_of(config) if self.fits(config) else None
        if task is None or not self._has_stacks(self.tasks[task], config):
            raise InputError(f"format 'hub': no {quote(self.model_type)} has these stacks; use 'polyformer'")
        tree = config.to_dict()
        origin = config.origin
        # Fields of another family would mean something else here.
        kept = origin.fields if origin is not None and origin.model_type == self.model_type else {}
        sides = {**tree, "encoder": tree["decoder"]} if self.is_decoder(config) else tree
        hub = {
            **kept,
            **self.required,
            **self.tasks[task].required,
            **write_options(self.config_mapping, sides),
            **self.write_other_options(sides),
            **write_options(self.tasks[task].config_mapping, tree["head"]),
            **self._write_labels(self.tasks[task], tree["head"], kept),
            "model_type": self.model_type,
            "architectures": [self.class_prefix + task],
        }
        # An option that theirs cannot express is lost, and shows as a difference after reading again.
        again, expected = self.config(hub, task).to_dict(), dict(tree)
        del again["origin"], expected["origin"]
        lost = differences(expected, again)
        if lost:
            raise InputError(
                f"format 'hub': no {quote(self.model_type)} has {'; '.join(lost)}; use 'polyformer'"
            )
        return hub, task

    def task(self, hub: Tree, head: str | HeadConfig | None) -> str:
        """Return the task of a `head`, given by class, the end of its name or our kind; of `hub` if None."""
        if head is None:
            check_values({"architectures": hub.get("architectures")})
            # A file that names no class gets the family's first.
            architectures = hub.get("architectures") or [self.class_prefix + next(iter(self.tasks))]
            return self._task_of_class(architectures[0])
        kind = head.kind if isinstance(head, HeadConfig) else head
        for name, task in self.tasks.items():
            if task.head.kind == kind:
                return name
        if isinstance(head, HeadConfig):
            kinds = [task.head.kind for task in self.tasks.values()]
            raise unknown(f"head of {quote(self.model_type)}", kind, kinds)
        return self._task_of_class(kind)

    def _task_of_class(self, architecture: str) -> str:
        task = architecture.removeprefix(self.class_prefix)
        if task not in self.tasks:
            known = [self.class_prefix + name for name in self.tasks]
            raise unknown(f"architecture of {quote(self.model_type)}", architecture, known)
        return task

    def task_of(self, config: ModelConfig) -> str:
        """Return the task with the model's head and stacks; of several, the task that it was loaded with."""
        able = [
            name
            for name, task in self.tasks.items()
            if task.head.kind == config.head.kind and self._has_stacks(task, config)
        ]
        origin = config.origin
        if origin is not None and origin.model_type == self.model_type:
            # Of several classes with one kind of head, the model returns to its own.
            loaded = origin.architecture.removeprefix(self.class_prefix)
            able = [loaded, *able] if loaded in able else able
        return able[0] if able else self.task({}, config.head)

    def fits(self, config: ModelConfig) -> bool:
        """Return whether a class of the family has the model's stacks."""
        return type(config) is type(self.template) and any(
            self._has_stacks(task, config) for task in self.tasks.values()
        )

    def _has_stacks(self, task: Task, config: ModelConfig) -> bool:
        """Return whether the model has exactly the stacks of the task's class."""
        if task.causal:
            return config.encoder is None and config.decoder is not None
        return all(
            (getattr(config, side, None) is None)
            == (getattr(self.template, side, None) is None or task.without == side)
            for side in ("encoder", "decoder")
        )

    def _read_labels(self, task: Task, hub: Tree, head: Tree) -> None:
        if task.labelled and "num_labels" in head:
            # Transformers usually writes the number of labels only as the length of id2label.
            head["num_labels"] = len(hub.get("id2label") or ()) or hub.get("num_labels", self.num_labels)
        if task.labelled and "num_labels" in (part := _scored(head)):
            dropouts = (hub.get(name) for name in self.head_dropouts)
            part["dropout"] = next((p for p in dropouts if p is not None), part["dropout"])
        if task.labelled and "problem" in head:
            read_options((PROBLEM,), hub, head)

    def _write_labels(self, task: Task, head: Tree, kept: Tree) -> Tree:
        dropout = {self.head_dropouts[0]: _scored(head).get("dropout")} if self.head_dropouts else {}
        if not task.labelled or "num_labels" not in _scored(head):
            return {}
        if "num_labels" not in head:
            return dropout
        names = kept.get("id2label") or {}
        if len(names) != head["num_labels"]:
            # Transformers' own names for labels without names.
            names = {str(i): f"LABEL_{i}" for i in range(head["num_labels"])}
        hub = {"id2label": names, "label2id": {name: int(i) for i, name in names.items()}}
        if "problem" in head:
            hub |= write_options((PROBLEM,), head)
        return hub | dropout


def _scored(head: Tree) -> Tree:
    """Return the part of a head with labels: a multiple-choice head's scorer of texts, or all of the head."""
    return head["text"] if head["kind"] == "choose" else head


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


class Family(ConfigConversion, KeyConversion):
    """A family of public models: a subclass defines the tables (`FamilyTables`)."""


FAMILIES: Registry[Family] = Registry("model_type")
"""The families by transformers' model_type."""


def register(family: type[Family]) -> type[Family]:
    """Register a family under its model_type."""
    FAMILIES.register(family.model_type)(family())
    return family
