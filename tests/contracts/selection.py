"""The cases of a contract: what the table of relevance asks for, out of all members there are."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from members import Case, distinct, every_case, families, numbered, parts
from relevance import RELEVANCE
from shared_models import shared

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.mechanisms.base import MechanismConfig
from polyformer.attention.patterns import Pattern
from polyformer.core.config import Config
from registered import EVERYTHING

SHAPES = ("decoder", "encoder", "pair")
DECODING = ("decoder", "pair")
"""The shapes of model that write text."""

SINGLE = ("decoder", "encoder")
"""The shapes with one stack."""


def kinds() -> set[str]:
    """Every kind of member: the families of a model's configuration, patterns, presets and variants."""
    return {family.__name__.removesuffix("Config") for family in families()} | {
        "Pattern",
        "Preset",
        "Variant",
    }


def chosen(contract: str, *abilities: str, shape: tuple[str, ...] = SHAPES) -> list[Case]:
    """The cases of a contract, of these shapes and with mechanisms that have all the abilities."""
    able = [case for case in every_case() if case.shape in shape and all(map(case.can, abilities))]
    shapes: dict[str, int] = {}
    result = []
    for case in able:
        concern = RELEVANCE[contract].concern(case.kind)
        shape_number = shapes.get(case.member, 0)
        shapes[case.member] = shape_number + 1
        if concern and concern.takes(shape_number):
            result.append(case)
    if EVERYTHING:
        return result
    presets = [case for case in result if case.kind == "Preset"]
    others = [case for case in result if case.kind != "Preset"]
    return others + cover(presets, others)


def cases(contract: str, *abilities: str, shape: tuple[str, ...] = SHAPES) -> list[Case]:
    """The cases of a contract that differ: every base has one member of every family."""
    return distinct(chosen(contract, *abilities, shape=shape))


def predicting(contract: str) -> list[Case]:
    """The cases of a contract that can generate text."""
    able = cases(contract, "causal", "supports_kv_cache", shape=DECODING)
    return [case for case in able if shared(case).head.predicts_next]


def members(contract: str) -> list[tuple[str, Config]]:
    """The examples that a contract concerns, outside of models."""
    table = RELEVANCE[contract]
    return [(name, part) for name, part, _ in numbered() if table.concern(name.partition("-")[0])]


def mechanisms(contract: str, *abilities: str) -> list[tuple[str, MechanismConfig]]:
    """The mechanisms that a contract concerns and that have all the abilities."""
    return [
        (name, config)
        for name, config in members(contract)
        if isinstance(config, MechanismConfig) and all(getattr(config, ability) for ability in abilities)
    ]


def patterns() -> list[tuple[str, Pattern]]:
    """The examples of every pattern, by its text."""
    return [
        (config.pattern.to_text(), config.pattern)
        for _, config in members("layout")
        if isinstance(config, SoftmaxConfig) and config.pattern
    ]


def cover(presets: Sequence[Case], others: Sequence[Case] = ()) -> list[Case]:
    """As few of the presets as show every option that none of the others shows."""
    options = {case: options_of(case) for case in presets}
    missing = set[Any]().union(*options.values()).difference(*map(options_of, others))
    result = []
    while missing:
        result.append(max(presets, key=lambda case: len(options[case] & missing)))
        missing -= options[result[-1]]
    return result


@functools.cache
def options_of(case: Case) -> set[tuple[str, str, Any]]:
    """What each part of the model is set to, and its shape; of a number, whether it is zero."""
    values = [
        (part, field.name, getattr(part, field.name))
        for part in parts(case.config)
        for field in dataclasses.fields(part)
    ]
    return {
        ("", "shape", case.shape),
        *((type(part).__name__, name, form(value)) for part, name, value in values),
    }


def form(value: Any) -> Any:
    """What two values share that take one way through the code."""
    if isinstance(value, (bool, str)) or value is None:
        return value
    return value != 0 if isinstance(value, (int, float)) else type(value).__name__
