"""The conversion of configurations by a family's tables: from their config.json to our configuration and
back.

A saved configuration is read again and compared, so that a model that its family cannot represent is refused.
"""

from polyformer.core.errors import InputError, quote, unknown
from polyformer.models.checkpoints.config_mapping import (
    PROBLEM,
    Tree,
    check_required,
    differences,
    read_options,
    write_options,
)
from polyformer.models.checkpoints.tables import FamilyTables, Task
from polyformer.models.checkpoints.values import check_values
from polyformer.models.config import ModelConfig, OriginConfig
from polyformer.nn.heads import HeadConfig


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
