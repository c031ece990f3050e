"""Weights that cannot be a model's: numbers that are none, integers in the place of numbers."""

import weakref
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import polyformer
from polyformer.core.errors import InputError
from polyformer.models.architectures.weights import load_weights
from polyformer.models.generation import GenerationConfig
from polyformer.models.presets import create_model


def tiny():
    return create_model(
        "decoder-tiny", hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=20
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_a_number_that_is_none_is_named(value: float, dtype: torch.dtype):
    weights = {name: tensor.to(dtype) for name, tensor in tiny().state_dict().items()}
    weights["tokens.weight"][3, 2] = value
    with pytest.raises(InputError, match=r"x: 'tokens.weight' contains NaN or infinity"):
        load_weights(tiny(), weights, "x")


def test_large_numbers_are_numbers():
    weights = tiny().state_dict()
    weights["tokens.weight"] = torch.full_like(weights["tokens.weight"], torch.finfo().max)
    load_weights(tiny(), dict(weights), "x")


def test_integers_are_no_weights(tmp_path):
    tiny().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["tokens.weight"] = weights["tokens.weight"].int()
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"'tokens.weight' is of torch.int32, expected a floating type"):
        polyformer.from_pretrained(tmp_path)


@pytest.mark.parametrize("beams", [1, 2])
def test_nothing_is_generated_from_scores_that_are_none(beams: int):
    model = tiny().eval()
    with torch.no_grad():
        model.tokens.weight.fill_(float("nan"))
    config = GenerationConfig.from_dict({"max_new_tokens": 3, "beam": {"num_beams": beams}})
    with pytest.raises(InputError, match="the model's scores are NaN"):
        model.generate(torch.ones(1, 4, dtype=torch.long), config=config)


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_a_scale_that_is_no_number(scale: float):
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(InputError, match="scale: expected a finite number"):
        polyformer.attend(q, q, q, scale=scale)


def test_a_part_of_a_file_is_released_once_it_is_copied():
    """So that the weights are in memory once, and the largest of them twice for a moment."""
    saved = tiny().state_dict()
    lent, alive, most = {}, set[str](), 0
    for name, tensor in saved.items():  # between two multiples of the alignment, as in a file
        buffer = torch.empty(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)
        weakref.finalize(buffer.untyped_storage(), alive.discard, name)
        lent[name] = buffer
        alive.add(name)
    del buffer

    class Counted(dict[str, Any]):
        def pop(self, name: str) -> Any:  # type: ignore[override]
            nonlocal most
            most = max(most, len(alive) - len(self))
            return super().pop(name)

    weights = Counted(lent)
    lent.clear()
    model = tiny()
    load_weights(model, weights, "x")
    assert not weights
    assert most <= 1
    assert all(torch.equal(saved[name], tensor) for name, tensor in model.state_dict().items())
