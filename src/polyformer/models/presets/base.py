"""Models by name: `create_model("bert-base", attention=Window(256) | Global(1))`."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from polyformer.core.argument_types import names_wrong_types
from polyformer.core.config import Config
from polyformer.core.names import register_names
from polyformer.core.registry import Registry
from polyformer.models.architectures import AnyConfig, Transformer, build_model
from polyformer.models.config import ModelConfig

C = TypeVar("C", bound=Config)
B = TypeVar("B", bound=Callable[..., AnyConfig])

MODELS: Registry[Callable[[], AnyConfig]] = Registry("model")
"""Preset name to the function that returns its configuration; the function's docstring cites the source."""

register = MODELS.register
register_names("model", lambda: dict.fromkeys(MODELS, ""), 'create_model("{name}")')


def register_sizes(description: str, sizes: Mapping[str, tuple[Any, ...]]) -> Callable[[B], B]:
    """Return a decorator that registers one preset for every row of a family's table of sizes.

    Args:
        description: the sentence that describes a preset and cites its source. `{layers}` stands for the
            builder's argument of that name, and every `{}` for the next text of the row.
        sizes: the name of a preset -> its row: the builder's arguments in their order as a tuple, and texts.

    The decorated function is the family's builder, which returns a configuration. It is not changed:

        @register_sizes("GPT decoder: {layers} layers, {} (Radford 2018).", {"gpt": ((12, 768), "117M")})
        def gpt(layers: int, width: int) -> ModelConfig: ...
    """

    def register_rows(build: B) -> B:
        for name, (arguments, *texts) in sizes.items():
            # By name, because a builder's last arguments are keyword-only.
            parameters = [*inspect.signature(build).parameters][: len(arguments)]
            names = dict(zip(parameters, arguments, strict=True))
            preset = functools.partial(build, **names)
            preset.__doc__ = description.format(*texts, **names)
            preset.__module__ = build.__module__
            register(name)(preset)
        return build

    return register_rows


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


def register_variants(description: str, variants: Mapping[str, tuple[Any, ...]]) -> None:
    """Register presets that change other presets.

    Args:
        description: as for `register_sizes`.
        variants: the name of a preset -> its row: the preset that it changes, the overrides, and texts for
            `description` (the last text is optional).
    """
    sizes = {name: ((preset, changes), *texts, "") for name, (preset, changes, *texts) in variants.items()}
    register_sizes(description, sizes)(model_config)


def size_options(layers: int, width: int, heads: int) -> dict[str, int]:
    """Return overrides for these sizes, with a feed-forward of four times the width."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
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
