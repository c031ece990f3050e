"""Weights that accelerate keeps in memory or on disk, and brings when a module is called."""

from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from twins import FIRST_OF_EACH, texts, transformers, twins

from polyformer.models import transformers as hub
from polyformer.models.presets import create_model

SMALL: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 40,
    "max_position_embeddings": 64,
}
OWN: list[dict[str, Any]] = [
    {"position": kind} for kind in ("rope", "alibi", "t5", "shaw", "transformer_xl", "da", "axial")
] + [
    {"mechanism": "performer"},
    {"mechanism": "linformer"},
    {"mechanism": "lsh"},
    {"feedforward": {"kind": "experts", "experts": 2}},
    {"mechanism": "adaptive_span"},
]


def unchanged(ours: Any, inputs: dict[str, torch.Tensor]) -> None:
    """Offloaded it computes what it computed, twice, and no weight stays."""
    with torch.no_grad():
        expected = ours(**inputs)
        offloaded = accelerate.cpu_offload(ours)
        for actual in (offloaded(**inputs), offloaded(**inputs)):
            for name, value in expected.items():
                assert not torch.is_tensor(value) or torch.equal(actual[name], value), name
    assert {parameter.device.type for parameter in ours.parameters()} == {"meta"}


@pytest.mark.parametrize(
    ("family", "task"), [case for case in FIRST_OF_EACH if case[0] != "decision_transformer"]
)
def test_offloaded_weights_change_nothing(family: str, task: str):
    ours, theirs = twins(family, task, torch.float32)
    inputs = {"input_ids": texts(2, 12)}
    if family == "t5":
        inputs["input_ids"][:, -1] = 1
    if task in ("ForMultipleChoice", "DoubleHeadsModel"):
        inputs["input_ids"] = inputs["input_ids"].unsqueeze(0)
    if theirs.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    unchanged(ours, inputs)


@pytest.mark.parametrize("options", OWN, ids=str)
def test_own_parts_are_offloaded(options: dict[str, Any]):
    torch.manual_seed(0)
    preset = "bert-base" if options.get("mechanism") == "linformer" else "decoder-tiny"
    unchanged(hub.wrap(create_model(preset, **SMALL, **options).eval()), {"input_ids": texts(2, 12)})


PLACES = [
    {"": "disk"},
    {"model.tokens": "cpu", "model.decoder_embedding": "cpu", "model.decoder": "disk", "model.head": "cpu"},
    {"model.tokens": "disk", "model.decoder_embedding": "cpu", "model.decoder": "cpu", "model.head": "cpu"},
    "auto",
]


def test_device_maps(tmp_path: Path):
    ours, _ = twins("gpt2", "LMHeadModel", torch.float32)
    ours.save_pretrained(tmp_path / "model")
    ids = texts(2)
    with torch.no_grad():
        expected = ours(ids).logits
    tokens = ours.generate(ids[:, :4], max_new_tokens=4, do_sample=False)
    for places in PLACES:
        again = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "model", device_map=places, offload_folder=tmp_path / "offloaded"
        )
        with torch.no_grad():
            assert torch.equal(again(ids).logits, expected), places
        assert torch.equal(again.generate(ids[:, :4], max_new_tokens=4, do_sample=False), tokens)


def test_no_layer_is_split():
    ours, _ = twins("gpt2", "LMHeadModel", torch.float32)
    layer = sum(parameter.nbytes for parameter in ours.model.decoder.layers[0].parameters())
    rest = sum(parameter.nbytes for parameter in ours.parameters()) - 2 * layer
    places = accelerate.infer_auto_device_map(
        ours, {0: rest + int(1.5 * layer), "cpu": 10**9}, no_split_module_classes=ours._no_split_modules
    )
    split = [name for name in places if name.startswith("model.decoder.layers.") and name.count(".") > 3]
    assert not split, places
    assert {0, "cpu"} <= set(places.values())
