"""A family of public models: its configuration, its tensors and its heads, as tables read in both directions.

One file of `families/` describes one family. Loading reads the tables one way, saving the other; and what is
saved is read again and compared, so that a model that its family cannot hold is refused, never bent.
"""

import dataclasses
import fnmatch
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from polyformer.architecture import ModelConfig, OriginConfig
from polyformer.checkpoints.fields import (
    Field,
    Tree,
    check_fixed,
    choice,
    differences,
    read_fields,
    write_fields,
)
from polyformer.checkpoints.names import ENDINGS, Link, Names, Part, links
from polyformer.checkpoints.values import check_values
from polyformer.core.errors import InputError, quote, unknown
from polyformer.core.registry import Registry
from polyformer.heads import HeadConfig
from polyformer.model import Transformer

PROBLEM = choice(
    "problem_type",
    None,
    {
        None: None,
        "regression": "regression",
        "single_label_classification": "single_label",
        "multi_label_classification": "multi_label",
    },
    "problem",
)
"""What the labels of a text are."""


@dataclasses.dataclass(frozen=True)
class Task:
    """What one of a family's classes predicts.

    head: ours. names: its tensors, `{base}` standing for the trunk's prefix. fields: what the configuration
    says of it, by paths in the head. copies: tensors that say again what others say, where
    the embeddings are tied. base: whether the
    trunk's tensors stand under the family's prefix. labelled: whether the number of labels and the dropout
    are those of the configuration. without: the stack that this class lacks, "encoder" or "decoder". trunk:
    names of the trunk's tensors where they are not the family's. unused_keys: patterns of tensors that the
    class has and computes nothing with.
    """

    head: HeadConfig
    names: Names = dataclasses.field(default_factory=dict)
    fields: tuple[Field, ...] = ()
    copies: Mapping[str, str] = dataclasses.field(default_factory=dict)
    base: bool = True
    labelled: bool = True
    without: str = ""
    trunk: Names | None = None
    unused_keys: tuple[str, ...] = ()

    def covers(self, field: Field) -> bool:
        """Whether a field says something of what this class has."""
        return any(path.split(".")[0] != self.without for path in field.ours)


class Family:
    """See the module's docstring; the class attributes are the tables.

    classes: what transformers' classes begin with. base: the prefix of the trunk's tensors, "" for none.
    template: a model of the family, in which `fields` are set. aliases: other names of options, as
    transformers takes them. fixed: options that have one value here. adjusted: options that `adjust` reads
    and `describe` writes. inert: options that change no number. ignored: patterns of tensors that hold
    nothing. dropouts: where a labelled head's stands, the first that is given. num_labels: where nothing
    says how many. tasks: by the end of the class's name. sizes: presets. model: our class, made from the
    template's.
    """

    model_type: ClassVar[str]
    classes: ClassVar[str]
    paper: ClassVar[str]
    objective: ClassVar[str]
    base: ClassVar[str] = ""
    template: ClassVar[ModelConfig]
    fields: ClassVar[tuple[Field, ...]]
    aliases: ClassVar[Mapping[str, str]] = {}
    fixed: ClassVar[Mapping[str, Any]] = {}
    adjusted: ClassVar[tuple[str, ...]] = ()
    inert: ClassVar[tuple[str, ...]] = ()
    names: ClassVar[Names]
    ignored: ClassVar[tuple[str, ...]] = ()
    dropouts: ClassVar[tuple[str, ...]] = ()
    num_labels: ClassVar[int] = 2
    tasks: ClassVar[Mapping[str, Task]]
    sizes: ClassVar[tuple[str, ...]] = ()
    model: ClassVar[type[Any]] = Transformer

    def adjust(self, tree: Tree, hub: Tree) -> None:
        """Set in our `tree` what no field can say of `hub`."""

    def describe(self, tree: Tree) -> Tree:
        """The reverse: entries of their configuration for our `tree`."""
        return {}

    def check(self, hub: Tree) -> None:
        """Raises `InputError` for what this family does not compute, beyond `fixed`."""

    def made(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of our tensors `own` that no file of theirs holds: what random numbers start from."""
        return {}

    def layers(self, config: ModelConfig) -> int:
        """The most layers that a stack has."""
        stacks = (config.encoder, config.decoder)
        return max(one.num_hidden_layers for one in stacks if one is not None)

    def tied(self, config: ModelConfig) -> bool:
        """Whether the output layer reads the token table."""
        return config.embedding.tied

    def task(self, hub: Tree, head: "str | HeadConfig | None") -> str:
        """The name of the task that is asked for: by class, by its end, by our kind of head, or in `hub`."""
        if head is None:
            check_values({"architectures": hub.get("architectures")})
            named = hub.get("architectures") or [self.classes + next(iter(self.tasks))]
            return self._named(named[0])
        kind = head.kind if isinstance(head, HeadConfig) else head
        for name, one in self.tasks.items():
            if one.head.kind == kind:
                return name
        if isinstance(head, HeadConfig):
            kinds = [one.head.kind for one in self.tasks.values()]
            raise unknown(f"head of {quote(self.model_type)}", kind, kinds)
        return self._named(kind)

    def _named(self, architecture: str) -> str:
        end = architecture.removeprefix(self.classes)
        if end not in self.tasks:
            known = [self.classes + name for name in self.tasks]
            raise unknown(f"architecture of {quote(self.model_type)}", architecture, known)
        return end

    def config(self, hub: Tree, task: str, head: HeadConfig | None = None) -> ModelConfig:
        """Our configuration of theirs; `head` takes the place of the one that `hub` describes."""
        hub = {self.aliases.get(name, name): value for name, value in hub.items()}
        check_values(hub)
        check_fixed(self.fixed, hub)
        self.check(hub)
        tree = self.template.to_dict()
        wanted = self.tasks[task]
        tree["head"] = (head or wanted.head).to_dict()
        read_fields(self.fields, hub, tree)
        self.adjust(tree, hub)
        if wanted.without:
            tree[wanted.without] = None
        if head is None:
            read_fields(wanted.fields, hub, tree["head"])
            self._read_labels(wanted, hub, tree["head"])
        mine = {one.theirs for one in (*self.fields, *wanted.fields) if wanted.covers(one)}
        mine |= {*self.fixed, *self.adjusted, "architectures"}
        kept = {name: value for name, value in hub.items() if name not in mine}
        tree["origin"] = OriginConfig(
            model_type=self.model_type, architecture=self.classes + task, fields=kept
        ).to_dict()
        return type(self.template).from_dict(tree)

    def hub(self, config: ModelConfig) -> tuple[Tree, str]:
        """Their configuration of ours, and the task. Raises `InputError` where it cannot say all of it."""
        if not self.fits(config):
            raise InputError(f"format 'hub': no {quote(self.model_type)} has these stacks; use 'polyformer'")
        task = self.task_of(config)
        tree = config.to_dict()
        origin = config.origin
        kept = origin.fields if origin is not None and origin.model_type == self.model_type else {}
        hub = {
            **kept,
            **self.fixed,
            **write_fields(self.fields, tree),
            **self.describe(tree),
            **write_fields(self.tasks[task].fields, tree["head"]),
            **self._write_labels(self.tasks[task], tree["head"], kept),
            "model_type": self.model_type,
            "architectures": [self.classes + task],
        }
        again, wanted = self.config(hub, task).to_dict(), dict(tree)
        del again["origin"], wanted["origin"]
        found = differences(wanted, again)
        if found:
            raise InputError(
                f"format 'hub': no {quote(self.model_type)} has {'; '.join(found)}; use 'polyformer'"
            )
        return hub, task

    def _read_labels(self, task: Task, hub: Tree, head: Tree) -> None:
        if task.labelled and "num_labels" in head:
            head["num_labels"] = len(hub.get("id2label") or ()) or hub.get("num_labels", self.num_labels)
            given = (hub.get(name) for name in self.dropouts)
            head["dropout"] = next((one for one in given if one is not None), head["dropout"])
        if task.labelled and "problem" in head:
            read_fields((PROBLEM,), hub, head)

    def _write_labels(self, task: Task, head: Tree, kept: Tree) -> Tree:
        if not task.labelled or "num_labels" not in head:
            return {}
        names = kept.get("id2label") or {}
        if len(names) != head["num_labels"]:
            names = {str(i): f"LABEL_{i}" for i in range(head["num_labels"])}
        found = {"id2label": names, "label2id": {name: int(i) for i, name in names.items()}}
        if "problem" in head:
            found |= write_fields((PROBLEM,), head)
        return {**found, self.dropouts[0]: head["dropout"]} if self.dropouts else found

    def task_of(self, config: ModelConfig) -> str:
        """The task whose head the model has."""
        able = [
            name
            for name, one in self.tasks.items()
            if one.head.kind == config.head.kind and self._has_stacks(one, config)
        ]
        origin = config.origin
        if origin is not None and origin.model_type == self.model_type:
            named = origin.architecture.removeprefix(self.classes)
            able = [named, *able] if named in able else able
        return able[0] if able else self.task({}, config.head)

    def fits(self, config: ModelConfig) -> bool:
        """Whether the model is of our class, and a class of the family has its stacks."""
        return type(config) is type(self.template) and any(
            self._has_stacks(one, config) for one in self.tasks.values()
        )

    def _has_stacks(self, task: Task, config: ModelConfig) -> bool:
        """Whether the model has the stacks that the task's class has, and no other."""
        return all(
            (getattr(config, side) is None) == (getattr(self.template, side) is None or task.without == side)
            for side in ("encoder", "decoder")
        )

    def table(self, task: str) -> dict[str, str | Part]:
        """All names of a model with the head of `task`."""
        wanted = self.tasks[task]
        base = f"{self.base}." if self.base and wanted.base else ""
        return {f"{base}{name}": one for name, one in (wanted.trunk or self.names).items()} | {
            name.replace("{base}", base): one for name, one in wanted.names.items()
        }

    def links(self, config: ModelConfig, task: str, own: Mapping[str, Any]) -> list[Link]:
        """Which tensor of theirs holds which of ours, for a model with the tensors `own`.

        Of a tied model without the copies, which files leave out.
        """
        copies = self.tasks[task].copies if self.tied(config) else ()
        found = links(self.table(task), own, self.layers(config))
        return [link for link in found if link.theirs not in copies]

    def unused_key(self, task: str, name: str) -> str | None:
        """The name in the class of `task` of a tensor that it computes nothing with; None for any other."""
        wanted = self.tasks[task]
        base = f"{self.base}." if self.base and wanted.base else ""
        patterns = [one.replace("{base}", base) for one in wanted.unused_keys]
        names = (name, f"{self.base}.{name}", name.removeprefix(f"{self.base}."))
        return next((one for one in names if any(fnmatch.fnmatchcase(one, p) for p in patterns)), None)

    def ignores(self, name: str) -> bool:
        """Whether a tensor holds nothing."""
        names = (name, f"{self.base}.{name}", name.removeprefix(f"{self.base}."))
        return any(fnmatch.fnmatchcase(one, pattern) for one in names for pattern in self.ignored)

    def expects(self, name: str) -> bool:
        """Whether a tensor belongs to the family, though perhaps to another head."""
        patterns = [*self.ignored]
        for task, wanted in self.tasks.items():
            patterns += [one.replace("{i}", "*") + end for one in self.table(task) for end in ENDINGS]
            patterns += [
                *wanted.copies,
                *(one.replace("{base}", f"{self.base}.") for one in wanted.unused_keys),
            ]
        names = (name, f"{self.base}.{name}", name.removeprefix(f"{self.base}."))
        return any(fnmatch.fnmatchcase(one, pattern) for one in names for pattern in patterns)


FAMILIES: Registry[Family] = Registry("model_type")
"""transformers' model_type to the family."""


def register(family: type[Family]) -> type[Family]:
    """A decorator that enters a family under its model_type."""
    FAMILIES.register(family.model_type)(family())
    return family
