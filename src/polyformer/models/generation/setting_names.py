"""Settings by name that override a configuration: `model.generate(ids, max_new_tokens=20, num_beams=4)`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from polyformer.core.config import Config, encode
from polyformer.core.errors import InputError, quote, unknown
from polyformer.models.generation.config import GenerationConfig

# Names in transformers that differ from the names here.
HUB_NAMES = {
    "decoder_start_token_id": "start",
    "eos_token_id": "eos",
    "pad_token_id": "pad",
    "stop_strings": "stop",
}


def _setting_paths() -> dict[str, tuple[str, ...]]:
    """Return every setting with its path in the configuration."""
    places: dict[str, tuple[str, ...]] = {}
    for field in dataclasses.fields(GenerationConfig):
        places[field.name] = (field.name,)
        if isinstance(field.default, Config):
            places |= {inner.name: (field.name, inner.name) for inner in dataclasses.fields(field.default)}
    return places


SETTING_PATHS = _setting_paths()


def _check_names(named: Mapping[str, Any]) -> None:
    for name, value in named.items():
        if name not in SETTING_PATHS:
            raise unknown("argument or setting of generate", name, {*SETTING_PATHS, *HUB_NAMES})
        if isinstance(value, Tensor):
            raise InputError(f"{name}: expected a plain value, got {quote(value)}; use .tolist()")


def with_settings(config: GenerationConfig, settings: Mapping[str, Any]) -> GenerationConfig:
    """Return `config` with `settings` by name, with this library's or transformers' names.

    As in transformers, `max_new_tokens` and `max_length` replace each other; `do_sample=False` and
    `num_beams=1` reset all settings of the method that they turn off. Raises `InputError` for an unknown
    name, with the nearest name.
    """
    tree = config.to_dict()
    named = {HUB_NAMES.get(name, name): value for name, value in settings.items()}
    alpha = named.get("penalty_alpha", config.contrastive.penalty_alpha)
    if alpha and named.get("top_k") is not None and not named.get("do_sample"):  # as in transformers
        named["candidates"] = named.pop("top_k")
    _check_names(named)
    for name, off in (("do_sample", False), ("num_beams", 1), ("penalty_alpha", 0)):
        if name in named and named[name] == off:
            tree[SETTING_PATHS[name][0]] = {}
    if named.get("max_new_tokens") is not None:
        tree["whole"]["max_length"] = None
    elif named.get("max_length") is not None:
        tree["max_new_tokens"] = None
    for name, value in named.items():
        *part, last = SETTING_PATHS[name]
        plural = name in ("eos", "stop") and isinstance(value, int | str)
        place = tree[part[0]] if part else tree
        if not isinstance(place, dict):
            raise InputError(f"{part[0]} and {name}: expected one of the two, got both")
        place[last] = [value] if plural else encode(value)
    return GenerationConfig.from_dict(tree)
