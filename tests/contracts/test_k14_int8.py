"""K14 a model with quantized weights is the model of those weights: in its numbers, decoding, on the disk."""

import copy
from pathlib import Path

import pytest
import torch
from members import CHOOSING, Case, parts
from selection import cases
from shared_models import shared

from polyformer.core.errors import InputError
from polyformer.core.ops import quantized as quantized_layers
from polyformer.core.ops.linear import Linear
from polyformer.core.ops.quantized import QuantizedWeight
from polyformer.models.architectures import Transformer, int4
from polyformer.models.architectures.weights import with_weights


def rounded(case: Case, weights: str = "int8") -> Transformer:
    """The case's model with quantized weights."""
    return with_weights(copy.deepcopy(shared(case, torch.float32)), weights)


def rounded_product(self: int4.StackedBlocks, x: torch.Tensor) -> torch.Tensor:
    """The product of the 4-bit kernel by its definition: x, d, m + 8d and y are rounded to bfloat16."""
    q, d, m = int4.unpacked(torch.cat(tuple(self.blocks)))
    scale, middle = (number.bfloat16().float().unsqueeze(2) for number in (d, m + 8 * d))
    weight = ((q.float() - 8) * scale + middle).flatten(1)[:, : self.inputs]
    return (x.bfloat16().float() @ weight.T).bfloat16().to(x.dtype)


@torch.no_grad()
@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("case", cases("int8"), ids=str)
def test_it_computes_what_the_same_weights_in_floating_point_do(
    case: Case, weights: str, monkeypatch: pytest.MonkeyPatch
):
    model, batch = rounded(case, weights), case.batch()
    assert not [module for module in model.modules() if type(module) is Linear]
    assert any(isinstance(module, QuantizedWeight) for module in model.modules())
    plain = with_weights(model, "float32")
    assert plain.config == case.config
    expected = plain(**batch).logits
    if not any(isinstance(part, CHOOSING) for part in parts(case.config)):
        # Activations in 8 bits err by a part in 256; norms of short keys enlarge the error of single logits.
        rounded_alike = expected
        if (
            weights == "int4"
        ):  # few channels enlarge the error of bfloat16 too, so the reference rounds as well
            with monkeypatch.context() as patch:
                patch.setattr(int4.StackedBlocks, "packed_product", rounded_product)
                rounded_alike = model(**batch).logits
        assert (model(**batch).logits - rounded_alike).norm() <= 0.03 * (expected.norm() + 1)
    monkeypatch.setattr(quantized_layers, "has_fast_product", lambda *_: False)
    torch.testing.assert_close(model(**batch).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("case", cases("int8 disk"), ids=str)
def test_it_survives_the_disk_bitwise_and_says_what_it_is(case: Case, weights: str, tmp_path: Path):
    model, batch = rounded(case, weights), case.batch()
    model.save_pretrained(tmp_path)
    loaded = Transformer.from_pretrained(tmp_path)
    assert loaded.config == model.config
    assert loaded.config.weights == weights
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
@pytest.mark.parametrize("case", cases("int8 decoding", "supports_kv_cache", shape=("decoder",)), ids=str)
def test_decoding_goes_on_as_one_pass_does(case: Case, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(quantized_layers, "has_fast_product", lambda *_: False)
    model, ids = rounded(case), case.batch()["input_ids"]
    whole = model(ids).last_hidden_state
    first = model(ids[:, :-2], use_cache=True)
    rest = model(ids[:, -2:], state=first.state)
    torch.testing.assert_close(rest.last_hidden_state, whole[:, -2:], rtol=1e-3, atol=1e-3)
