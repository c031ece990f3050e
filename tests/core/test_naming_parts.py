"""One way to name a part, everywhere: its kind, an expression, a mapping or a configuration; also a pattern
where a mechanism stands."""

from typing import Any

import pytest

from pairwise import pairwise
from polyformer.attention.mechanisms import AlternateConfig, LSHConfig, SoftmaxConfig
from polyformer.attention.mechanisms.base import MechanismConfig
from polyformer.attention.patterns import Global, Window
from polyformer.attention.positions import RopeConfig
from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.models.config import ModelConfig
from polyformer.models.presets import create_model, model_config, overridden
from polyformer.nn.block import ParallelConfig
from polyformer.nn.feedforward import ExpertsConfig
from polyformer.nn.heads import ClassifyConfig
from polyformer.training.recipes import Recipe
from polyformer.training.recipes.recipe import ModelChoice, merged, nested

PARTS: list[tuple[str, str, Any]] = [
    ("attention", "lsh(buckets=8, window=16)", LSHConfig(buckets=8, window=16)),
    ("mechanism", "lsh(buckets=8, window=16)", LSHConfig(buckets=8, window=16)),
    ("attention", "lsh", LSHConfig()),
    ("position", "rope(base=10000)", RopeConfig(base=10000.0)),
    ("feedforward", "experts(experts=8)", ExpertsConfig(experts=8)),
    ("block", "parallel", ParallelConfig()),
    ("head", "classify(num_labels=3)", ClassifyConfig(num_labels=3)),
]
PATTERN = Window(64) | Global(1)


def part(config: ModelConfig, name: str) -> Any:
    stack = config.encoder or config.decoder
    assert stack is not None
    if name in ("attention", "mechanism"):
        return stack.attention.mechanism
    return config.head if name == "head" else getattr(stack, name)


@pytest.mark.parametrize(("name", "text", "expected"), PARTS)
def test_every_way_names_the_same_part(name: str, text: str, expected: Config):
    base = model_config("encoder-tiny")
    for value in (text, expected, expected.to_dict()):
        changed = base.override(name, value)
        assert part(changed, name) == expected
        assert ModelConfig.from_yaml(changed.to_yaml()) == changed
    choice = ModelChoice.from_dict({"preset": "encoder-tiny", name: text})
    assert part(choice.config(), name) == expected
    assert part(Recipe.from_yaml(Recipe(model=choice).to_yaml()).model.config(), name) == expected
    assert part(create_model("encoder-tiny", **{name: text}).config, name) == expected


@pytest.mark.parametrize("name", ["attention", "mechanism"])
@pytest.mark.parametrize("value", [PATTERN, "Window(64) | Global(1)", "(Window(64) | Global(1))"])
def test_a_pattern_stands_for_softmax_attention_over_it(name: str, value: Any):
    assert part(model_config("encoder-tiny", {name: value}), name) == SoftmaxConfig(pattern=PATTERN)
    assert MechanismConfig.from_dict(value) == SoftmaxConfig(pattern=PATTERN)
    if isinstance(value, str):
        tree = model_config("encoder-tiny").to_dict()
        tree["encoder"]["attention"] = value
        assert part(ModelConfig.from_dict(tree), name) == SoftmaxConfig(pattern=PATTERN)


def test_parts_stand_inside_parts():
    text = "alternate(mechanisms=[softmax(pattern=Window(64) | Global(1), dropout=0.5), lsh(buckets=2)])"
    mechanisms = SoftmaxConfig(pattern=PATTERN, dropout=0.5), LSHConfig(buckets=2)
    assert MechanismConfig.from_dict(text) == AlternateConfig(mechanisms=mechanisms)


def test_a_pattern_leaves_the_scale_and_the_dropout_and_a_mechanism_the_heads():
    neo = model_config("gpt-neo-125m", {"attention": "Window(64)"})
    assert part(neo, "attention") == SoftmaxConfig(pattern=Window(64), scale=1.0)
    changed = model_config("gpt2", {"attention": {"kind": "lsh"}})
    assert changed.decoder is not None
    assert changed.decoder.attention.num_attention_heads == 12


PATHS = (
    "attention",
    "mechanism",
    "pattern",
    "attention.mechanism",
    "mechanism.pattern",
    "decoder.attention",
    "decoder.attention.mechanism",
    "decoder.attention.mechanism.pattern",
)


@pytest.mark.parametrize(
    ("preset", "path", "value"), pairwise(["t5-small", "gpt-neo-125m"], PATHS, [PATTERN, PATTERN.to_text()])
)
def test_a_pattern_keeps_a_preset_s_scale_wherever_it_is_put(preset: str, path: str, value: Any):
    base = model_config(preset)
    data = nested(path, value) if isinstance(value, str) else {path: value}
    for config in (
        model_config(preset, {path: value}),
        overridden(base, {path: value}),
        ModelChoice.from_dict({"preset": preset, **data}).config(),
    ):
        assert config.decoder is not None
        mechanism = config.decoder.attention.mechanism
        assert mechanism == SoftmaxConfig(pattern=PATTERN, scale=1.0, dropout=mechanism.dropout)  # type: ignore[attr-defined]
        if config.encoder is not None:
            assert config.encoder.attention.mechanism.scale == 1.0  # type: ignore[attr-defined]


def test_a_mapping_without_a_kind_changes_the_part_that_is_there():
    base = model_config("gpt-neo-125m")
    for options in ({"attention": {"num_attention_heads": 6}}, {"attention.num_attention_heads": 6}):
        changed = model_config("gpt-neo-125m", options)
        assert changed == base.override("num_attention_heads", 6)
    assert part(base.override("mechanism", {"scale": 2.0}), "mechanism").pattern is not None
    dotted = model_config("reformer-small", {"mechanism.mechanisms.rounds": 3})
    assert dotted == model_config("reformer-small", {"rounds": 3}) != model_config("reformer-small")
    with pytest.raises(InputError, match="unknown option of attention 'num_heads': did you mean"):
        base.override("attention", {"num_heads": 3})


def test_a_bare_name_reaches_every_one_of_several_parts():
    config = model_config("t-dmca-tiny", {"dropout": 0.37})
    alternated = part(config, "mechanism")
    assert isinstance(alternated, AlternateConfig)
    assert len(alternated.mechanisms) > 1
    assert all(mechanism.dropout == 0.37 for mechanism in alternated.mechanisms)  # type: ignore[attr-defined]


def test_a_recipe_s_expression_is_changed_option_by_option():
    base = {"model": {"preset": "encoder-tiny", "mechanism": "lsh(window=16)"}}
    changed = merged(base, nested("model.mechanism.buckets", 4))
    choice = ModelChoice.from_dict(changed["model"])
    assert part(choice.config(), "mechanism") == LSHConfig(window=16, buckets=4)
    whole = merged({"model": {"attention": "Window(3)"}}, nested("model.attention.kind", "lsh"))
    assert whole == {"model": {"attention": {"kind": "lsh"}}}


@pytest.mark.parametrize("text", ["Window(64)", "Window(64) | Global(1)", "lsh(buckets=4)", "lsh"])
def test_a_recipe_s_attention_is_given_other_heads(text: str):
    base = {"model": {"preset": "t5-small", "attention": text}}
    changed = merged(base, nested("model.attention.num_attention_heads", 2))
    choice, plain = (ModelChoice.from_dict(recipe["model"]).config() for recipe in (changed, base))
    assert choice == plain.override("num_attention_heads", 2)
    assert part(choice, "attention") == part(plain, "attention")


@pytest.mark.parametrize("path", ["attention.mechanism.pattern", "mechanism.pattern"])
def test_a_recipe_s_pattern_is_changed_for_another(path: str):
    name = path.partition(".")[0]
    changed = merged({"model": {"preset": "t5-small", name: "Window(64)"}}, nested(f"model.{path}", "Full()"))
    assert ModelChoice.from_dict(changed["model"]).config() == model_config("t5-small", {"pattern": "Full()"})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("attention", "lhs", "unknown mechanism or pattern of attention 'lhs': did you mean 'lsh'"),
        ("attention", "Windw(3)", "unknown mechanism or pattern of attention 'Windw': did you mean 'Window'"),
        ("attention", 3, "attention: expected a kind"),
        ("mechanism", {"kind": "lhs"}, "unknown kind of mechanism 'lhs': did you mean 'lsh'"),
        ("attention", "lsh(bukets=3)", "unknown option of attention 'bukets': did you mean 'buckets'"),
        ("position", "roep", "unknown kind of position 'roep': did you mean 'rope'"),
        ("position", "rope(500)", "position: expected 'kind(name=value, ...)', got 'rope(500)'"),
    ],
)
def test_unknown_kinds_and_options_of_parts_are_refused(name: str, value: Any, message: str):
    with pytest.raises(InputError) as caught:
        model_config("encoder-tiny", {name: value})
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(("name", "value"), [("attention", 3), ("attention", "lhs"), ("mechanism", [1])])
def test_an_error_tells_every_way(name: str, value: Any):
    with pytest.raises(InputError) as caught:
        model_config("encoder-tiny", {name: value})
    ways = (
        "a kind ('",
        "(name=value)'",
        "a mapping ({kind: ",
        "a MechanismConfig",
        "'Window(64) | Global(1)'",
    )
    assert all(way in str(caught.value) for way in ways)
