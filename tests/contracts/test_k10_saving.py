"""K10 configurations and models survive a file, bitwise; what a file says wrongly is refused by name."""

import copy
import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from members import Case, families, parts
from selection import cases, members, patterns
from shared_models import shared

from polyformer.attention.mechanisms.base import MechanismConfig
from polyformer.attention.patterns import Pattern
from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.models.architectures import Transformer
from polyformer.models.architectures.weights import ALIGNMENT
from polyformer.models.config import ModelConfig
from polyformer.models.presets import MODELS
from polyformer.nn.depth.exits.exits import ExitsConfig
from polyformer.nn.stack import AttentionConfig


@pytest.mark.parametrize("case", cases("text"), ids=str)
def test_a_configuration_survives_json_and_yaml(case: Case):
    assert ModelConfig.from_json(case.config.to_json()) == case.config
    assert ModelConfig.from_yaml(case.config.to_yaml()) == case.config
    assert ModelConfig.from_dict(case.config.to_dict()) == case.config


MODULES = sorted({MODELS[name].__module__ for name in MODELS})


@pytest.mark.parametrize("module", MODULES)
def test_presets_survive_json_at_full_size(module: str):
    for name in MODELS:
        if MODELS[name].__module__ == module:
            config = MODELS[name]()
            assert type(config).from_json(config.to_json()) == config, name
            assert MODELS[name].__doc__, f"{name}: the docstring of a preset cites its source"


@pytest.mark.parametrize(("name", "pattern"), patterns())
def test_a_pattern_survives_its_text(name: str, pattern: Pattern):
    assert Pattern.from_text(pattern.to_text()) == pattern
    if type(pattern).__name__ in Pattern.registry:  # a union has a sign and no name
        with pytest.raises(InputError, match="no_such_option"):
            Pattern.from_text(f"{type(pattern).__name__}(no_such_option=1)")


@pytest.mark.parametrize("case", cases("disk"), ids=str)
def test_a_model_survives_the_disk_bitwise(case: Case, tmp_path: Path):
    model, batch = shared(case, torch.float32), case.batch()
    model.save_pretrained(tmp_path)
    loaded = Transformer.from_pretrained(tmp_path)
    assert loaded.config == case.config
    assert not loaded.training
    own, theirs = model.state_dict(), loaded.state_dict()
    assert own.keys() == theirs.keys()
    for name, tensor in own.items():
        assert torch.equal(tensor, theirs[name]), name
        assert theirs[name].data_ptr() % ALIGNMENT == 0, "elsewhere in memory products may round otherwise"
    assert torch.equal(loaded(**batch).logits, model(**batch).logits)
    assert all(parameter.requires_grad for parameter in loaded.parameters())


def mappings(data: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every mapping inside `data`."""
    if isinstance(data, dict):
        yield path
        for key, value in data.items():
            yield from mappings(value, (*path, key))


def at(data: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        data = data[key]
    return data


@pytest.mark.parametrize("case", cases("names"), ids=str)
def test_unknown_options_and_kinds_are_refused_by_name(case: Case):
    data = case.config.to_dict()
    for path in mappings(data):
        wrong = copy.deepcopy(data)
        at(wrong, path)["no_such_option"] = 1
        with pytest.raises(InputError, match="'no_such_option'"):
            ModelConfig.from_dict(wrong)
        if "kind" in at(data, path):
            wrong = copy.deepcopy(data)
            at(wrong, path)["kind"] = "no_such_kind"
            with pytest.raises(InputError, match="'no_such_kind'"):
                ModelConfig.from_dict(wrong)


@pytest.mark.parametrize(("name", "member"), members("own options"))
def test_wrong_types_are_refused_by_name(name: str, member: Config):
    for field in dataclasses.fields(member):
        data = {**member.to_dict(), field.name: [{"not": "this"}]}
        with pytest.raises(InputError, match=field.name):
            type(member).from_dict(data)


@pytest.mark.parametrize(("name", "member"), members("names"))
def test_a_member_is_written_as_an_expression(name: str, member: Config):
    """In every example; a pattern as the option of softmax attention."""
    for example in [member, *(type(member).examples() if "Pattern" not in name else [])]:
        data = example.to_dict()
        kind = data.pop("kind")
        text = f"{kind}({', '.join(f'{option}={value!r}' for option, value in data.items())})"
        assert example.family.from_dict(text) == example


@pytest.mark.parametrize("family", families())
def test_members_have_a_kind_a_docstring_and_no_catch_all(family: type[Config]):
    for kind, member in family.kinds.items():
        assert member.kind == kind
        assert member.examples()
        assert member.__doc__
        for name, function in inspect.getmembers(member, inspect.isfunction):
            named = inspect.signature(function).parameters.values()
            catches = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in named)
            assert name.startswith("__") or not catches, function


ATTENTION = "attention", "attention.mechanism", "attention.mechanism.pattern"
OF_ENCODER = {path.split(".")[-1]: f"encoder.{path}" for path in ATTENTION}


def sees_later_tokens(value: Any) -> bool:
    value = value.mechanism if isinstance(value, AttentionConfig) else value
    pattern = isinstance(value, Pattern) and not value.causal()
    return pattern or (isinstance(value, MechanismConfig) and not value.causal)


@pytest.mark.parametrize("case", cases("names"), ids=str)
def test_every_part_can_be_overridden_by_its_name(case: Case):
    """Every option of every part outside lists is reachable, and setting it to what it is changes nothing."""
    for part in parts(case.config, listed=False):
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            name = field.name
            if name == "bias" and isinstance(value, tuple):  # of attention alone, reached by its path
                continue
            if name == "scaled" and value is None:  # of the embedding, where the head's is true or false
                name = "embedding.scaled"
            if name == "depth" and isinstance(value, ExitsConfig) and case.config.encoder is not None:
                name = "decoder.depth"  # an encoder has no exits
            if name in OF_ENCODER and case.config.decoder is not None and sees_later_tokens(value):
                name = OF_ENCODER[name]
            assert case.config.override(name, value) is not None
