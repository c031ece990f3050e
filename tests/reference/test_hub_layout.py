"""What transformers' files hold beside the weights that a model reads is not lost.

That every class of every family comes back to transformers tensor by tensor, test_families checks.
"""

from pathlib import Path

import pytest
import torch
from families import equal, read_by_theirs
from family_table import tiny

import polyformer
from polyformer.models.checkpoints import convert, from_transformers


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("big_bird", "ForMaskedLM"),
        ("bart", "ForCausalLM"),
        ("reformer", "ModelWithLMHead"),
        ("decision_transformer", "Model"),
    ],
)
def test_what_nothing_reads_outlives_our_format(name: str, task: str, tmp_path: Path):
    theirs = tiny(name, task)
    ours = from_transformers(theirs)
    assert ours.unused_tensors
    ours.save_pretrained(tmp_path / "own")
    again = polyformer.from_pretrained(tmp_path / "own")
    equal(again.unused_tensors, ours.unused_tensors)
    equal(read_by_theirs(again, theirs, tmp_path / "hub"), theirs.state_dict())
    ours.unused_tensors = {}
    ours.save_pretrained(tmp_path / "own")
    again = polyformer.from_pretrained(tmp_path / "own")
    assert not again.unused_tensors, "nothing of the model before stays"


def test_a_bias_without_effect_is_kept(tmp_path: Path):
    theirs = tiny("deberta-v2", "Model", share_att_key=False)
    assert "encoder.layer.0.attention.self.pos_key_proj.bias" in theirs.state_dict()
    equal(read_by_theirs(from_transformers(theirs), theirs, tmp_path), theirs.state_dict())


def test_what_nothing_reads_has_the_type_of_the_weights(tmp_path: Path):
    theirs = tiny("big_bird", "ForMaskedLM")
    actual = read_by_theirs(from_transformers(theirs).double(), theirs, tmp_path)
    assert {item.dtype for item in actual.values() if item.is_floating_point()} == {torch.float64}


def test_a_conversion_keeps_what_nothing_reads_or_says_that_it_is_left():
    ours = from_transformers(tiny("big_bird", "ForMaskedLM"))
    longer, report = convert(ours, max_positions=60)
    assert longer.unused_tensors.keys() == ours.unused_tensors.keys()
    assert not report.left
    other, report = convert(ours, polyformer.Window(4))
    assert not other.unused_tensors
    assert set(report.left) == set(ours.unused_tensors) == {"bert.pooler.weight", "bert.pooler.bias"}
