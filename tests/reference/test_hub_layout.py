"""Every class of every family, saved for transformers: loaded there tensor by tensor, and none is lost."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import classes, tiny
from torch import nn

import polyformer
from polyformer.checkpoints import FAMILIES, convert, from_transformers
from polyformer.model import Transformer

CASES = [
    (name, architecture, options)
    for name, architecture in classes()
    for options in ({}, {"tie_word_embeddings": False})
    if not options or "tie_word_embeddings" not in FAMILIES[name].required
]
NAMES = [f"{case[1]}{'-untied' if case[2] else ''}" for case in CASES]


def saved_and_loaded(ours: Transformer, theirs: nn.Module, folder: Path) -> dict[str, torch.Tensor]:
    """What transformers reads of what we wrote, without a word of something missing or too much."""
    ours.save_pretrained(folder, format="hub")
    again, info = type(theirs).from_pretrained(folder, output_loading_info=True)  # type: ignore[attr-defined]
    assert not any(info.values()), info
    return again.state_dict()


def equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


@pytest.mark.parametrize(("name", "architecture", "options"), CASES, ids=NAMES)
def test_no_tensor_is_lost(name: str, architecture: str, options: dict[str, Any], tmp_path: Path):
    theirs = tiny(name, architecture, **options)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = polyformer.from_pretrained(tmp_path / "theirs")
    equal(saved_and_loaded(ours, theirs, tmp_path / "hub"), theirs.state_dict())


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("big_bird", "BigBirdForMaskedLM"),
        ("bart", "BartForCausalLM"),
        ("reformer", "ReformerModelWithLMHead"),
        ("decision_transformer", "DecisionTransformerModel"),
    ],
)
def test_what_nothing_reads_outlives_our_format(name: str, architecture: str, tmp_path: Path):
    theirs = tiny(name, architecture)
    ours = from_transformers(theirs)
    assert ours.unused_tensors
    ours.save_pretrained(tmp_path / "own")
    again = polyformer.from_pretrained(tmp_path / "own")
    equal(again.unused_tensors, ours.unused_tensors)
    equal(saved_and_loaded(again, theirs, tmp_path / "hub"), theirs.state_dict())
    ours.unused_tensors = {}
    ours.save_pretrained(tmp_path / "own")
    assert not polyformer.from_pretrained(tmp_path / "own").unused_tensors, (
        "nothing of the model before stays"
    )


def test_a_bias_without_effect_is_kept(tmp_path: Path):
    theirs = tiny("deberta-v2", "DebertaV2Model", share_att_key=False)
    assert "encoder.layer.0.attention.self.pos_key_proj.bias" in theirs.state_dict()
    equal(saved_and_loaded(from_transformers(theirs), theirs, tmp_path), theirs.state_dict())


def test_what_nothing_reads_has_the_type_of_the_weights(tmp_path: Path):
    theirs = tiny("big_bird", "BigBirdForMaskedLM")
    actual = saved_and_loaded(from_transformers(theirs).double(), theirs, tmp_path)
    assert {item.dtype for item in actual.values() if item.is_floating_point()} == {torch.float64}


def test_a_conversion_keeps_what_nothing_reads_or_says_that_it_is_left(tmp_path: Path):
    theirs = tiny("big_bird", "BigBirdForMaskedLM")
    ours = from_transformers(theirs)
    longer, report = convert(ours, max_positions=60)
    assert longer.unused_tensors.keys() == ours.unused_tensors.keys()
    assert not report.left
    other, report = convert(ours, polyformer.Window(4))
    assert not other.unused_tensors
    assert set(report.left) == set(ours.unused_tensors) == {"bert.pooler.weight", "bert.pooler.bias"}
