"""K14 a model whose weights are int8 is the model of those weights: the numbers, in decoding, on the disk."""

import copy
from pathlib import Path

import pytest
import torch
from members import CHOOSING, Case, parts
from selection import cases
from shared_models import shared

from polyformer.core.errors import InputError
from polyformer.core.ops import int8_layers
from polyformer.core.ops.int8_layers import Int8Weight
from polyformer.core.ops.linear import Linear
from polyformer.models.architectures import Transformer
from polyformer.models.architectures.weights import with_weights


def rounded(case: Case) -> Transformer:
    """The case's model with weights in int8."""
    return with_weights(copy.deepcopy(shared(case, torch.float32)), "int8")


@torch.no_grad()
@pytest.mark.parametrize("case", cases("int8"), ids=str)
def test_it_computes_what_the_same_weights_in_floating_point_do(case: Case, monkeypatch: pytest.MonkeyPatch):
    model, batch = rounded(case), case.batch()
    assert not [module for module in model.modules() if type(module) is Linear]
    assert any(isinstance(module, Int8Weight) for module in model.modules())
    plain = with_weights(model, "float32")
    assert plain.config == case.config
    expected = plain(**batch).logits
    if not any(isinstance(part, CHOOSING) for part in parts(case.config)):
        largest = float(expected.abs().max()) + 1
        torch.testing.assert_close(model(**batch).logits, expected, rtol=0, atol=0.02 * largest)
    monkeypatch.setattr(int8_layers, "has_fast_product", lambda *_: False)
    torch.testing.assert_close(model(**batch).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", cases("int8 disk"), ids=str)
def test_it_survives_the_disk_bitwise_and_says_what_it_is(case: Case, tmp_path: Path):
    model, batch = rounded(case), case.batch()
    model.save_pretrained(tmp_path)
    loaded = Transformer.from_pretrained(tmp_path)
    assert loaded.config == model.config
    assert loaded.config.weights == "int8"
    own, theirs = model.state_dict(), loaded.state_dict()
    assert own.keys() == theirs.keys()
    for name, tensor in own.items():
        assert tensor.dtype == theirs[name].dtype
        assert torch.equal(tensor, theirs[name]), name
    assert torch.equal(loaded(**batch).logits, model(**batch).logits)
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    with pytest.raises(InputError, match="cannot be trained"):
        loaded.train()
    assert not loaded.training


@torch.no_grad()
@pytest.mark.parametrize("case", cases("int8 decoding", shape=("decoder",)), ids=str)
def test_decoding_goes_on_as_one_pass_does(case: Case, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(int8_layers, "has_fast_product", lambda *_: False)
    model, ids = rounded(case), case.batch()["input_ids"]
    whole = model(ids).last_hidden_state
    first = model(ids[:, :-2], use_cache=True)
    rest = model(ids[:, -2:], state=first.state)
    torch.testing.assert_close(rest.last_hidden_state, whole[:, -2:], rtol=1e-3, atol=1e-3)
