"""Models by name: `create_model("bert-base", attention=Window(256) | Global(1))`.

A preset is a row of named fields, an object of its family's class, which builds the configuration:

    register_presets(Gpt2("gpt2", "GPT-2 decoder (Radford et al. 2019).", layers=12, width=768, heads=12))

A user's preset is a function with a docstring: `@register("my-model")`.
"""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from polyformer.attention.positions import GridConfig
from polyformer.core.config import Config
from polyformer.core.modules import names_wrong_types
from polyformer.core.registry import Registry, register_names
from polyformer.models.architectures import AnyConfig, Transformer, build_model
from polyformer.models.config import ModelConfig

C = TypeVar("C", bound=Config)

MODELS: Registry[Callable[[], AnyConfig]] = Registry("model")
"""Preset name to the function or row that returns its configuration; its docstring cites the source."""

register = MODELS.register
register_names("model", lambda: dict.fromkeys(MODELS, ""), 'create_model("{name}")')


@dataclasses.dataclass(frozen=True)
class Preset(abc.ABC):
    """A row of a family's table; the classes of families add fields for their sizes and choices.

    Args:
        name: the name for `create_model`.
        description: a sentence that says what the model is and cites its source; it becomes the docstring.
    """

    name: str
    description: str

    def __post_init__(self):
        object.__setattr__(self, "__doc__", self.description)

    @abc.abstractmethod
    def config(self) -> AnyConfig:
        """Return the configuration of this row."""

    def __call__(self) -> AnyConfig:
        return self.config()


@dataclasses.dataclass(frozen=True, kw_only=True)
class SizedPreset(Preset):
    """A row with the sizes that most families state.

    Args:
        layers: the number of layers, of each stack if a model has two.
        width: the size of hidden states.
        heads: the number of attention heads.
    """

    layers: int
    width: int
    heads: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant(Preset):
    """Another preset with changes.

    Args:
        base: the name of the preset that is changed.
        changes: overrides by option name, as `model_config` takes them.
    """

    base: str
    changes: Mapping[str, Any]

    def config(self) -> ModelConfig:
        return model_config(self.base, dict(self.changes))


def register_presets(*rows: Preset) -> None:
    """Register the rows of a family by their names."""
    for row in rows:
        register(row.name)(row)


@names_wrong_types
def model_config(name: str, overrides: dict[str, Any] | None = None) -> ModelConfig:
    """Return the configuration of preset `name` with `overrides` by option name.

    A bare name sets the option everywhere in the model, a dotted path (`decoder.num_hidden_layers`) in one
    place. A part is selected by its kind, an expression, a mapping or a configuration:

        position="rope"     "rope(base=500)"     {"kind": "rope", "base": 500}     RopeConfig(base=500)

    `attention` or `mechanism` also takes a pattern for every layer: `Window(64) | Global(1)`, or its text.

    Raises:
        InputError: an unknown preset or option, with the nearest names; a value of the wrong type.
    """
    config: Any = MODELS[name]()
    return overridden(config, overrides or {})


def overridden(config: C, overrides: dict[str, Any]) -> C:
    """Return `config` with `overrides` by option name, as `model_config` takes them."""
    for option, value in overrides.items():
        config = config.override(option, value)
    return config


def size_options(layers: int, width: int, heads: int) -> dict[str, int]:
    """Return overrides for these sizes, with a feed-forward of four times the width."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
    }


def image_options(height: int, width: int, channels: int, levels: int = 256) -> dict[str, object]:
    """Return overrides for images as sequences: a token for each level and a start token."""
    shape = (height, width, channels) if channels > 1 else (height, width)
    return {
        "vocab_size": levels + 1,
        "max_position_embeddings": height * width * channels + 1,
        "position": GridConfig(shape=shape),
        "tied": False,
    }


@names_wrong_types
def create_model(name: str, **overrides: Any) -> Transformer:
    """Return a model with fresh weights; see `model_config` for the overrides."""
    model: Any = build_model(model_config(name, overrides))
    return model


@names_wrong_types
def list_models(pattern: str = "*") -> list[str]:
    """Return the names of the presets that match a shell wildcard: `list_models("bert*")`."""
    return MODELS.names(pattern)
