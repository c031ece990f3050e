"""Model directories: what is saved comes back, and what does not fit is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from polyformer.core.errors import InputError
from polyformer.models.architectures import Transformer
from polyformer.models.presets import create_model


def tiny() -> Transformer:
    torch.manual_seed(0)
    sizes = {"vocab_size": 31, "hidden_size": 12, "intermediate_size": 16, "max_position_embeddings": 20}
    return create_model("gpt2", **sizes, num_hidden_layers=2, num_attention_heads=3).double().eval()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tiny().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_dtypes_survive_the_disk(saved: Path):
    loaded = Transformer.from_pretrained(saved)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float64}
    x = torch.arange(10).view(2, 5)
    assert torch.equal(loaded(x).logits, tiny()(x).logits)


def change(folder: Path, function: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    function(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda tensors: tensors.pop("tokens.weight"), "the tensor 'tokens.weight' is missing"),
        (lambda tensors: tensors.update(extra=torch.zeros(1)), "'extra'"),
        (
            lambda tensors: tensors.update({"tokens.weight": torch.zeros(3, 2)}),
            r"'tokens.weight' has shape \(3, 2\), expected \(31, 12\)",
        ),
    ],
)
def test_weights_that_do_not_fit_are_named(saved: Path, damage: Any, message: str):
    change(saved, damage)
    with pytest.raises(InputError, match=message):
        Transformer.from_pretrained(saved)


def test_what_is_not_a_model_directory_is_refused(saved: Path, tmp_path: Path):
    with pytest.raises(InputError, match=r"not a model directory \(it has no config.json\)"):
        Transformer.from_pretrained(tmp_path)
    (saved / "model.safetensors").write_bytes((saved / "model.safetensors").read_bytes()[:100])
    with pytest.raises(InputError, match=r"model\.safetensors is damaged"):
        Transformer.from_pretrained(saved)
    data = json.loads((saved / "config.json").read_text())
    data["vocab_sise"] = 3
    (saved / "config.json").write_text(json.dumps(data))
    with pytest.raises(
        InputError, match="unknown option of ModelConfig 'vocab_sise': did you mean 'vocab_size'"
    ):
        Transformer.from_pretrained(saved)
