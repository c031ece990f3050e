"""Files of checkpoints with anything in them: configurations, settings, indices, heads of safetensors."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hostile import cases, changed_bytes, changed_data, changed_json, survives
from hypothesis import example, given
from hypothesis import strategies as st

import polyformer
from polyformer.core.errors import InputError
from polyformer.models.checkpoints.family import FAMILIES
from polyformer.models.checkpoints.save import save
from polyformer.models.generation.hub_format import from_hub
from polyformer.models.presets import create_model

SIZES = {
    **{"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24},
    **{"vocab_size": 50, "max_position_embeddings": 20},
}


def described(name: str) -> dict[str, Any]:
    """Return a config.json of a family: of its template, or transformers' if a class needs more than that."""
    try:
        return FAMILIES[name].hub_config(FAMILIES[name].template)[0]
    except InputError:
        return transformers.AutoConfig.for_model(name).to_dict()


CONFIGS = {name: described(name) for name in FAMILIES}
GENERATION = {
    **{"max_length": 20, "min_length": 2, "do_sample": True, "temperature": 0.7, "top_k": 50, "top_p": 0.9},
    **{"num_beams": 4, "early_stopping": True, "length_penalty": 2.0, "no_repeat_ngram_size": 3},
    **{"repetition_penalty": 1.2, "eos_token_id": [2, 3], "pad_token_id": 1, "decoder_start_token_id": 2},
    **{"bad_words_ids": [[3], [4, 5]], "suppress_tokens": [1, 2], "begin_suppress_tokens": [7]},
    **{"num_return_sequences": 2, "forced_bos_token_id": 0, "forced_eos_token_id": 2, "stop_strings": ["a"]},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small checkpoints: transformers' layout in one file and in several, and ours."""
    root = tmp_path_factory.mktemp("checkpoints")
    model = create_model("bert-base", **SIZES)
    model.save_pretrained(root / "hub", format="hub")
    model.save_pretrained(root / "own")
    shutil.copytree(root / "hub", root / "sharded")
    (root / "sharded" / "model.safetensors").unlink()
    save(model, root / "sharded", shard_size=20000)
    return {path.name: path for path in root.iterdir()}


def load(folder: Path, name: str, content: bytes) -> None:
    """Loads the checkpoint with this content in place of one of its files."""
    path = folder / name
    before = path.read_bytes()
    path.write_bytes(content)
    try:
        polyformer.from_pretrained(folder)
    finally:
        path.write_bytes(before)


def build(described: Any) -> None:
    """What loading does before it looks at the weights."""
    family = FAMILIES[described.get("model_type")]
    config = family.config(described, family.task(described, None))
    with torch.device("meta"):
        family.model(config)


def small(described: dict[str, Any]) -> dict[str, Any]:
    """With two layers, so that a case is quick."""
    layers = {"n_layer", "n_layers", "num_layers", "num_hidden_layers", "encoder_layers", "decoder_layers"}
    return {name: 2 if name in layers else value for name, value in described.items()}


@cases(400, 6000)
@example({**small(CONFIGS["deberta"]), "relative_attention": True, "max_relative_positions": None})
@given(st.sampled_from(sorted(CONFIGS)).flatmap(lambda name: changed_data(small(CONFIGS[name]))))
def test_configurations_of_public_families(described: Any):
    survives(lambda: build(described) if isinstance(described, dict) else None)


@cases(60)
@given(st.data())
@pytest.mark.parametrize("name", ["hub", "own"])
def test_config_files(folders: dict[str, Path], name: str, data: st.DataObject):
    text = (folders[name] / "config.json").read_text()
    content = data.draw(changed_json(text))
    survives(lambda: load(folders[name], "config.json", content))


@cases(100)
@given(changed_data(GENERATION))
def test_settings_of_generation(changed: Any):
    survives(lambda: from_hub(changed) if isinstance(changed, dict) else None)


@cases(60)
@given(st.data())
def test_indices(folders: dict[str, Path], data: st.DataObject):
    name = "model.safetensors.index.json"
    text = (folders["sharded"] / name).read_text()
    content = data.draw(changed_json(text))
    survives(lambda: load(folders["sharded"], name, content))


@cases(80)
@given(st.data())
def test_heads_of_safetensors(folders: dict[str, Path], data: st.DataObject):
    whole = (folders["hub"] / "model.safetensors").read_bytes()
    length = 8 + int.from_bytes(whole[:8], "little")
    if data.draw(st.booleans()):
        content = data.draw(changed_bytes(whole, length))
    else:
        head = json.dumps(data.draw(changed_data(json.loads(whole[8:length])))).encode()
        content = len(head).to_bytes(8, "little") + head + whole[length:]
    survives(lambda: load(folders["hub"], "model.safetensors", content))
