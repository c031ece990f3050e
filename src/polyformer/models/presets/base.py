"""Models by name: `create_model("bert-base", attention=Window(256) | Global(1))`."""

from collections.abc import Callable
from typing import Any, TypeVar

from polyformer.core.config import Config
from polyformer.core.names import register_names
from polyformer.core.registry import Registry
from polyformer.models.architectures import AnyConfig, Transformer, build_model
from polyformer.models.config import ModelConfig

C = TypeVar("C", bound=Config)

MODELS: Registry[Callable[[], AnyConfig]] = Registry("model")
"""Preset name to the function that makes its configuration; the function's docstring cites the source."""

register = MODELS.register
register_names("model", lambda: dict.fromkeys(MODELS, ""), 'create_model("{name}")')


def model_config(name: str, overrides: dict[str, Any] | None = None) -> ModelConfig:
    """The configuration of preset `name` with `overrides` by option name.

    A bare name sets the option wherever the model has it, a dotted path (`decoder.num_hidden_layers`) in one
    place. A part is named by its kind, an expression, a mapping or a configuration:

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


def sizes(layers: int, width: int, heads: int) -> dict[str, int]:
    """Overrides that make a preset as large as this, its feed-forward of four times the width."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
    }


def create_model(name: str, **overrides: Any) -> Transformer:
    """A model with fresh weights: see `model_config` for the overrides."""
    model: Any = build_model(model_config(name, overrides))
    return model


def list_models(pattern: str = "*") -> list[str]:
    """The presets whose names match a shell wildcard: `list_models("bert*")`."""
    return MODELS.names(pattern)
