"""What describes a family of public models: its configuration, its tensors and its heads, as tables.

One file of `families/` fills in these tables for one family. They are read in both directions: loading
reads them one way, saving the other (`config_conversion`, `key_conversion`).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from polyformer.architecture import ModelConfig
from polyformer.checkpoints.config_mapping import Option, Tree
from polyformer.checkpoints.key_mapping import KeyMapping
from polyformer.heads import HeadConfig
from polyformer.model import Transformer


@dataclasses.dataclass(frozen=True)
class Task:
    """One class of transformers: the trunk of its family with a head.

    head: our head. key_mapping: the head's tensors, `{base}` standing for the trunk's prefix. config_mapping:
    the options that describe the head, by paths in it. tied_keys: tensors that repeat others where the
    embeddings are tied, by name the one that each repeats. prefixed: whether the trunk's tensors stand under
    the family's prefix. base: this class's prefix, where it is not the family's. labelled: whether number of
    labels and dropout are those of the configuration. without: the stack that this class lacks, "encoder" or
    "decoder". trunk: the trunk's key mapping where it is not the family's. unused_keys: patterns of tensors
    that the class has and computes nothing with. required: options of which this class has another value than
    the family. causal: whether the family's encoder is a decoder in this class.
    """

    head: HeadConfig
    key_mapping: KeyMapping = dataclasses.field(default_factory=dict)
    config_mapping: tuple[Option, ...] = ()
    tied_keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    prefixed: bool = True
    base: str = ""
    labelled: bool = True
    without: str = ""
    trunk: KeyMapping | None = None
    unused_keys: tuple[str, ...] = ()
    required: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    causal: bool = False

    def covers(self, option: Option) -> bool:
        """Whether an option describes something that this class has."""
        return any(path.split(".")[0] != self.without for path in option.ours)


class FamilyTables:
    """The tables of a family, as class attributes, and the functions for what no table can say.

    Of transformers' classes:
        class_prefix: what their names begin with. tasks: the classes, by the end of their name.
        base_model_prefix: the prefix of the trunk's tensors, "" for none.
    Of the configuration:
        template: a model of the family, in which the options are set. config_mapping: the options that are
        ours under another name. aliases: other names of options. required: options of which one value is
        supported. other_options: those of `read_other_options` and `write_other_options`. ignored_options:
        those that change no number. head_dropouts: options of the dropout of a labelled head; the first that
        is set holds. num_labels: the number of labels where nothing says it.
    Of the tensors:
        key_mapping: the trunk's tensors. ignored_keys: patterns of tensors that hold no weights.
    Of ours:
        removed: the version of transformers from which on it lacks the family, "" for none.
        sizes: the presets. model: the class that is built of the template's configuration.
    """

    model_type: ClassVar[str]
    class_prefix: ClassVar[str]
    removed: ClassVar[str] = ""
    paper: ClassVar[str]
    objective: ClassVar[str]
    base_model_prefix: ClassVar[str] = ""
    template: ClassVar[ModelConfig]
    config_mapping: ClassVar[tuple[Option, ...]]
    aliases: ClassVar[Mapping[str, str]] = {}
    required: ClassVar[Mapping[str, Any]] = {}
    other_options: ClassVar[tuple[str, ...]] = ()
    ignored_options: ClassVar[tuple[str, ...]] = ()
    key_mapping: ClassVar[KeyMapping]
    ignored_keys: ClassVar[tuple[str, ...]] = ()
    head_dropouts: ClassVar[tuple[str, ...]] = ()
    num_labels: ClassVar[int] = 2
    tasks: ClassVar[Mapping[str, Task]]
    sizes: ClassVar[tuple[str, ...]] = ()
    model: ClassVar[type[Any]] = Transformer

    def check(self, hub: Tree) -> None:
        """Raises `InputError` for options that this family does not compute, beyond `required`."""

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Sets in our `tree` what the config mapping cannot say of their `hub`."""

    def write_other_options(self, tree: Tree) -> Tree:
        """The reverse: entries of their configuration for our `tree`."""
        return {}

    def generated_tensors(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of our tensors `own` that no public file holds: the seeds of random numbers."""
        return {}

    def layers(self, config: ModelConfig) -> int:
        """The number of layers of the deepest stack."""
        stacks = (config.encoder, config.decoder)
        return max(stack.num_hidden_layers for stack in stacks if stack is not None)

    def tied(self, config: ModelConfig) -> bool:
        """Whether the output layer reads the token table."""
        return config.embedding.tied
