"""A part is written in the same way wherever it is written, and refusals name what works."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from polyformer import Window
from polyformer.attention.mechanisms import AlternateConfig, LinformerConfig, SoftmaxConfig
from polyformer.attention.mechanisms.base import MechanismConfig
from polyformer.cli.main import main
from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.models.config import ModelConfig
from polyformer.models.presets import create_model, model_config
from polyformer.nn.feedforward import AlternateFeedForwardConfig, DenseConfig, GatedConfig
from polyformer.nn.stack import AttentionConfig, StackConfig
from polyformer.training.recipes.recipe import ModelChoice

PARTS: dict[str, tuple[Any, ...]] = {
    "attention": ("linformer", "linformer(k=8)", "Window(4)", "Window(4) | Global(1)", Window(4)),
    "mechanism": ("linformer", "linformer(k=8)", "Window(4)", Window(4), {"kind": "linformer", "k": 8}),
    "position": ("rope", "rope(base=500)", {"kind": "rope", "base": 500.0}),
    "feedforward": ("gated", "gated(activation='silu')", {"kind": "gated"}),
    "block": ("pre", {"kind": "pre"}),
    "norm": ("rms", "rms(eps=1e-3)", {"kind": "rms"}),
    "head": ("masked", "classify(num_labels=3)", {"kind": "classify"}),
}
WRITTEN = [(axis, value) for axis, values in PARTS.items() for value in values]
SHAPE = {"vocab_size": 11, "hidden_size": 16}


def read(config: ModelConfig, axis: str) -> Config:
    stack = config.encoder
    assert stack is not None
    if axis in ("attention", "mechanism"):
        return stack.attention.mechanism
    return config.head if axis == "head" else getattr(stack, axis)


def constructed(axis: str, value: Any) -> ModelConfig:
    if axis == "head":
        return ModelConfig(**SHAPE, encoder=StackConfig(), head=value)
    if axis == "mechanism":
        return ModelConfig(**SHAPE, encoder=StackConfig(attention=AttentionConfig(mechanism=value)))
    return ModelConfig(**SHAPE, encoder=StackConfig(**{axis: value}))


def mapping(axis: str, value: Any) -> dict[str, Any]:
    if axis == "head":
        return {**SHAPE, "encoder": {}, "head": value}
    return {**SHAPE, "encoder": {"attention": {axis: value}} if axis == "mechanism" else {axis: value}}


def dotted(axis: str) -> str:
    return {"head": "head", "mechanism": "encoder.attention.mechanism"}.get(axis, f"encoder.{axis}")


DOORS: dict[str, Callable[[str, Any], ModelConfig]] = {
    "constructor": constructed,
    "constructor of mappings": lambda axis, value: ModelConfig(**mapping(axis, value)),
    "from_dict": lambda axis, value: ModelConfig.from_dict(mapping(axis, value)),
    "override": lambda axis, value: model_config("encoder-tiny").override(axis, value),
    "dotted override": lambda axis, value: model_config("encoder-tiny").override(dotted(axis), value),
    "create_model": lambda axis, value: create_model("encoder-tiny", **{axis: value}).config,
    "recipe": lambda axis, value: ModelChoice.from_dict({"preset": "encoder-tiny", axis: value}).config(),
}


@pytest.mark.parametrize(("axis", "value"), WRITTEN, ids=str)
def test_every_axis_at_every_door(axis: str, value: Any):
    expected = read(model_config("encoder-tiny").override(axis, value), axis)
    for name, door in DOORS.items():
        assert read(door(axis, value), axis) == expected, name


@pytest.mark.parametrize(
    ("axis", "value"), [(axis, value) for axis, value in WRITTEN if not isinstance(value, Window)]
)
def test_the_command_line_is_a_door(
    axis: str, value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "notes.txt").write_text("a few words\n" * 60)
    text = yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()
    words = ["train", "--model.preset", "encoder-tiny", f"--model.{axis}", text, "--data"]
    assert main([*words, str(tmp_path / "notes.txt"), "--tokenizer.algorithm", "bytes", "--print"]) == 0
    model = ModelChoice.from_dict(yaml.safe_load(capsys.readouterr().out)["model"]).config()
    assert isinstance(model, ModelConfig)
    assert read(model, axis) == read(model_config("encoder-tiny", {axis: value}), axis)


WRONG = {
    "attention": ("linfromer", "mechanism or pattern of", "did you mean 'linformer'"),
    "mechanism": ("linfromer", "mechanism or pattern of", "did you mean 'linformer'"),
    "position": ("rop", "kind of", "did you mean 'rope'"),
    "feedforward": ("gatde", "kind of", "did you mean 'gated'"),
    "block": ("preo", "kind of", "did you mean 'pre'"),
    "norm": ("rsm", "kind of", "did you mean 'rms'"),
    "head": ("maskd", "kind of", "did you mean 'masked'"),
}


@pytest.mark.parametrize("axis", WRONG)
def test_an_error_names_every_way(axis: str):
    text, *parts = WRONG[axis]
    ways = ["a kind ('", "(name=value)'", "a mapping ({kind: ", "Config", axis]
    ways += ["'Window(64) | Global(1)'"] if axis in ("attention", "mechanism") else []
    for name, door in DOORS.items():
        for value, named in ((text, parts), (3, ["got 3"])):
            with pytest.raises(InputError) as caught:
                door(axis, value)
            for part in (*named, *ways):
                assert part in str(caught.value), name


def test_lists_of_parts_are_read():
    mechanism = AlternateConfig(mechanisms=["linformer", "Window(3)"])  # type: ignore[arg-type]
    assert mechanism.mechanisms == (LinformerConfig(), SoftmaxConfig(pattern=Window(3)))
    feedforward = AlternateFeedForwardConfig(feedforwards=("dense", {"kind": "gated"}))  # type: ignore[arg-type]
    assert feedforward.feedforwards == (DenseConfig(), GatedConfig())
    assert SoftmaxConfig(pattern="Window(3)") == SoftmaxConfig(pattern=Window(3))  # type: ignore[arg-type]


UNRELATED = sorted(
    kind for kind, mechanism in MechanismConfig.kinds.items() if not mechanism.supports_score_bias
)


@pytest.mark.parametrize("kind", UNRELATED)
def test_positions_that_a_refusal_names_work(kind: str):
    preset = "decoder-tiny" if MechanismConfig.kinds[kind].causal else "encoder-tiny"
    mechanism = MechanismConfig.kinds[kind].examples()[0]
    with pytest.raises(
        InputError, match=r"cannot use a position scheme that changes the scores.*; .*or choose a position"
    ) as no:
        create_model(preset, mechanism=mechanism, position="alibi")
    named = re.findall(r"'(\w+)'", str(no.value).partition("or choose a position")[2])
    assert len(named) >= 3
    for position in named:
        model = create_model(preset, mechanism=mechanism, position=position).eval()
        assert model(torch.zeros(1, 8, dtype=torch.long)).logits.isfinite().all()


def test_packing_that_a_mechanism_cannot_do_says_how_to_do_without():
    model = create_model("encoder-tiny", mechanism="linformer(k=4, max_length=16)")
    ids = torch.zeros(1, 8, dtype=torch.long)
    with pytest.raises(InputError, match=r"'linformer' cannot separate documents .*--task\.packed false"):
        model(ids, document_ids=ids)


def test_a_block_that_widens_names_the_table_it_needs():
    join = "reversible(join=concat)"
    with pytest.raises(InputError, match=r"needs token vectors of hidden_size 256.*tied=False"):
        create_model("decoder-tiny", block=join)
    model = create_model("decoder-tiny", block=join, tied=False)
    assert model(torch.zeros(1, 3, dtype=torch.long)).logits.shape == (1, 3, 512)
