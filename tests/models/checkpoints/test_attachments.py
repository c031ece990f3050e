"""Checkpoints with attachments of `polyformer.attach`: our model gives the logits of transformers' model."""

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

import polyformer  # noqa: E402
from polyformer.core.errors import InputError  # noqa: E402

SIZES = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 64}


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")
    own = {"sliding_window": 9, "num_key_value_heads": 2} if name == "Mistral" else {}
    kind = "BertForMaskedLM" if name == "Bert" else f"{name}ForCausalLM"
    model = getattr(transformers, kind)(config(**SIZES, **own)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("Llama", [{"attention": "Window(4) | Global(1)"}]),
        (
            "Llama",
            [{"attention": "PerLayer([Window(4), Full()])"}, {"attention": "Window(2)", "layers": [1]}],
        ),
        ("Llama", [{"memory": "sinks(first=2, length=5)"}]),
        ("Llama", [{"memory": "sinks(first=2, length=5)", "attention": "Window(7)"}]),
        ("Mistral", [{"attention": "Window(4)", "layers": [0]}]),
        ("Bert", [{"attention": "Window(3)"}]),
    ],
)
def test_attachments_are_parts_of_the_loaded_model(name: str, calls: list[dict[str, Any]], tmp_path: Path):
    model = model_of(name)
    for call in calls:
        polyformer.attach(model, **call)
    model.save_pretrained(tmp_path)
    ids = torch.randint(5, 50, (2, 30), generator=torch.Generator().manual_seed(1))
    loaded = polyformer.from_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits, atol=2e-5, rtol=1e-4)
        dense = model_of(name)(ids).logits
        assert (dense - loaded(ids).logits).abs().max() > 0.01


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"cache": "snapkv(budget=8, window=2)"}, "cache='snapkv'.*--cache snapkv"),
        ({"position": "alibi"}, "position='alibi'"),
        ({"attention": "Window(4)", "layers": "model.layers.1.self_attn"}, "layers='model.layers.1"),
        ({"memory": "sinks(first=2, length=5)", "layers": [0]}, "a memory in some of the layers"),
    ],
)
def test_what_has_no_equal_part_is_refused(call: dict[str, Any], message: str, tmp_path: Path):
    polyformer.attach(model_of("Llama"), **call).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=message) as refusal:
        polyformer.from_pretrained(tmp_path)
    assert "to null" in str(refusal.value)
