"""The description of a family of public models: its configuration, its tensors and its heads, as tables.

One file of `families/` defines these tables for one family. They are read in both directions: one to load,
the other to save (`config_conversion`, `key_conversion`).
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from torch import Tensor

from polyformer.models.architectures import Transformer
from polyformer.models.checkpoints.config_mapping import Option, Tree
from polyformer.models.checkpoints.key_mapping import KeyMapping
from polyformer.models.checkpoints.values import usual_aliases
from polyformer.models.config import ModelConfig
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
