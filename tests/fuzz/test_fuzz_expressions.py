"""Expressions of patterns, and configurations of every part of a model, cut and mixed."""

from typing import Any

import torch
from hostile import cases, changed_data, changed_text, survives
from hypothesis import given
from hypothesis import strategies as st

from polyformer.attention.mechanisms.base import MechanismConfig
from polyformer.attention.patterns.base import Pattern
from polyformer.attention.positions import PositionConfig
from polyformer.cli.plots.pattern import pictures
from polyformer.core.parsing import with_options
from polyformer.core.sequence.context import Context
from polyformer.models.architectures import Transformer
from polyformer.models.config import ModelConfig
from polyformer.nn.block import BlockConfig
from polyformer.nn.feedforward import FeedForwardConfig
from polyformer.nn.heads import HeadConfig
from registered import registered

PATTERNS = [item.to_text() for cls in registered(Pattern.registry) for item in cls.examples()]
PARTS = {
    "mechanism": MechanismConfig,
    "position": PositionConfig,
    "feedforward": FeedForwardConfig,
    "block": BlockConfig,
    "head": HeadConfig,
}
CONFIGS = [
    (part, config.to_dict())
    for part, family in PARTS.items()
    for kind in family.kinds.values()
    for config in kind.examples()
]
EXPRESSIONS = [
    "lsh(buckets=8, window=16)",
    "alibi",
    "experts(experts=4, expert=gated(activation='silu'))",
    "softmax(pattern=Window(8) | Global(1), dropout=0.1)",
    "alternate(mechanisms=[lsh, softmax])",
]
NUMBERS = (0, 1, -1, 2, 24, 10**4, 2**24, 2**31 - 1, 2**31, 2**62, 10**21, 1.5, "'a'", None, [], [3])


def model_with(part: str, config: Any) -> dict[str, Any]:
    """A small model's configuration with this part in it."""
    stack: dict[str, Any] = {"num_hidden_layers": 2, "attention": {"num_attention_heads": 2}}
    whole: dict[str, Any] = {"vocab_size": 11, "hidden_size": 16, "encoder": stack}
    if part == "mechanism":
        stack["attention"]["mechanism"] = config
    else:
        (whole if part == "head" else stack)[part] = config
    return whole


def build(described: Any) -> None:
    config = ModelConfig.from_dict(described)
    with torch.device("meta"):
        Transformer(config)
    assert ModelConfig.from_json(config.to_json()) == config


def draw_pattern(text: str) -> None:
    pattern = Pattern.from_text(text)
    pictures(pattern, Context(24, 24), heads=2)
    assert Pattern.from_text(pattern.to_text()) == pattern


@cases(150)
@given(
    st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=3)
    .map(" | ".join)
    .flatmap(lambda text: changed_text(text, 1))
)
def test_patterns(text: str):
    survives(lambda: draw_pattern(text))


@cases(150)
@given(st.data())
def test_numbers_in_patterns(data: st.DataObject):
    name = data.draw(st.sampled_from([cls.__name__ for cls in registered(Pattern.registry)]))
    numbers = data.draw(st.lists(st.sampled_from(NUMBERS), max_size=4))
    survives(lambda: draw_pattern(f"{name}({', '.join(map(str, numbers))})"))


@cases(100)
@given(st.sampled_from(EXPRESSIONS).flatmap(changed_text))
def test_expressions_of_parts(text: str):
    survives(lambda: build(model_with("mechanism", with_options(text, "mechanism"))))
    survives(lambda: build(model_with("position", text)))


@cases(200)
@given(st.sampled_from(CONFIGS).flatmap(lambda case: st.tuples(st.just(case[0]), changed_data(case[1]))))
def test_configurations_of_parts(changed: tuple[str, Any]):
    survives(lambda: build(model_with(*changed)))
