"""Directories, configurations and options from which no model can be loaded: a named error."""

import json
import re
from pathlib import Path

import pytest
import torch
from damage import SIZES, edited, fails

import polyformer
from polyformer.core.errors import InputError
from polyformer.models.checkpoints.family import FAMILIES
from polyformer.models.presets import create_model


def test_unknown_model_type(copy: Path):
    message = fails(edited(copy, model_type="bret"))
    assert "model_type 'bret' is not supported; did you mean 'bert'" in message


def test_a_family_that_is_not_ours_is_named_before_its_weights_are_missed(copy: Path):
    (copy / "model.safetensors").unlink()
    message = fails(edited(copy, model_type="mamba"))
    assert "model_type 'mamba' is not supported" in message
    assert "gpt2" in message
    with pytest.raises(InputError, match="model_type 'mamba' is not supported"):
        polyformer.models.checkpoints.config_of(copy)


def test_a_file_where_a_directory_is_expected(tmp_path: Path):
    (tmp_path / "a.safetensors").write_bytes(b"GGUF")
    assert "expected, instead of a file, a directory" in fails(tmp_path / "a.safetensors")


def test_unknown_architecture(copy: Path):
    message = fails(edited(copy, architectures=["BertForMaskedLN"]))
    assert "BertForMaskedLN" in message
    assert "BertForMaskedLM" in message


def test_an_option_that_is_not_supported(copy: Path):
    message = fails(edited(copy, position_embedding_type="relative_key"))
    assert (
        message == "config.json: position_embedding_type is 'relative_key', and only 'absolute' is supported"
    )


def test_unknown_activation(copy: Path):
    assert "hidden_act" in fails(edited(copy, hidden_act="geglu"))


def test_config_of_another_size(copy: Path):
    message = fails(edited(copy, intermediate_size=48))
    assert "(24, 16)" in message
    assert "(48, 16)" in message


def test_damaged_config(copy: Path):
    (copy / "config.json").write_text('{"model_type": "be')
    assert "config.json: not JSON" in fails(copy)


def test_no_directory(tmp_path: Path):
    assert "no such directory" in fails(tmp_path / "nowhere")
    assert "not a model directory" in fails(tmp_path)


def test_another_head_starts_fresh_and_says_so(copy: Path):
    expected = polyformer.from_pretrained(copy)
    with pytest.warns(UserWarning, match="newly initialized: head.dense.weight"):
        model = polyformer.from_pretrained(copy, head="BertForSequenceClassification")
    assert model.config.head.kind == "classify"
    assert torch.equal(model.tokens.weight, expected.tokens.weight)
    assert bool(model.get_parameter("head.output.weight").isfinite().all())
    assert "did you mean" in fails(copy, head="BertForSequenceClasification")


def test_a_model_of_no_family_is_refused(tmp_path: Path):
    model = create_model("bert-base", **SIZES, attention=polyformer.Window(3))
    with pytest.raises(InputError, match="no public family"):
        model.save_pretrained(tmp_path / "out", format="hub")
    with pytest.raises(InputError, match="unknown format 'hug'"):
        model.save_pretrained(tmp_path / "out", format="hug")
    assert not (tmp_path / "out").exists()


def test_an_id_outside_the_vocabulary(copy: Path):
    with pytest.raises(InputError, match="expected ids from 0 to 49"):
        polyformer.from_pretrained(copy)(torch.tensor([[1, 50]]))


@pytest.mark.parametrize(
    "content", ["[]", "3", "null", '"x"', "[" * 5000, '{"model_type": []}', '{"a": 1, "a": 2}']
)
def test_a_config_that_is_none(copy: Path, content: str):
    (copy / "config.json").write_text(content)
    fails(copy)


@pytest.mark.parametrize("layers", [51, 4096])
def test_layers_that_no_weights_are_for(copy: Path, tmp_path: Path, layers: int):
    """Refused before the layers are built."""
    assert f"too few for the {layers} layers" in fails(edited(copy, num_hidden_layers=layers))
    create_model("decoder-tiny", num_hidden_layers=1, hidden_size=16).save_pretrained(tmp_path / "own")
    own = json.loads((tmp_path / "own" / "config.json").read_text())
    own["decoder"]["num_hidden_layers"] = layers
    (tmp_path / "own" / "config.json").write_text(json.dumps(own))
    assert f"too few for the {layers} layers" in fails(tmp_path / "own")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000, expected an integer from 1 to 4096"),
        ({"hidden_size": 2**40}, "hidden_size is 1099511627776, expected an integer from 1 to 16777216"),
        ({"hidden_size": "16"}, "hidden_size is '16', expected an integer"),
        ({"hidden_size": 16.0}, "hidden_size is 16.0, expected an integer"),
        ({"hidden_size": True}, "hidden_size is True, expected an integer"),
        ({"layer_norm_eps": "1e3"}, "layer_norm_eps is '1e3', expected a number from 0 to 1"),
        ({"initializer_range": -0.02}, "initializer_range is -0.02, expected a number from 0 to 1"),
        ({"hidden_act": ["gelu"]}, r"hidden_act is \['gelu'\], expected a text"),
        ({"architectures": [5]}, r"architectures is \[5\], expected a list, each a text or null"),
        ({"architectures": "BertModel"}, "architectures is 'BertModel', expected a list"),
        ({"type_vocab_size": None}, "type_vocab_size is None, expected an integer from 0"),
        ({"hidden_dropout_prob": 2}, "hidden_dropout_prob is 2, expected a number from 0 up to"),
        ({"id2label": ["a"]}, "id2label is .* expected an object of numbers to names"),
        ({"id2label": {"x": "a"}}, "id2label is .* expected an object of numbers to names"),
        ({"model_type": ["bert"]}, r"model_type \['bert'\] is not supported"),
        ({"pad_token_id": [0]}, r"pad_token_id is \[0\], expected an integer"),
    ],
)
def test_values_that_no_config_has(copy: Path, changes: dict[str, object], message: str):
    assert re.search(message, fails(edited(copy, **changes)))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gptj", {"n_head": 0}),
        ("gptj", {"n_head": 8192}),
        ("gptj", {"rotary_dim": "64"}),
        ("albert", {"num_hidden_groups": "1"}),
        ("longformer", {"attention_window": {}}),
        ("longformer", {"attention_window": [512, "512"]}),
        ("longformer", {"max_position_embeddings": None}),
        ("xlm", {"n_langs": "3"}),
        ("reformer", {"attn_layers": 3}),
        ("reformer", {"axial_pos_shape": 64}),
        ("reformer", {"num_buckets": ["a"]}),
        ("reformer", {"lsh_attn_chunk_length": 0, "num_buckets": None}),
        ("gpt_neo", {"attention_types": [[["global"], 10**9]]}),
        ("gpt_neo", {"attention_types": [["global", 1]]}),
        ("llama", {"num_key_value_heads": "8"}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": "2"}}),
        ("llama", {"rms_norm_eps": None}),
        ("mistral", {"sliding_window": 0}),
        ("qwen2", {"max_window_layers": -1}),
        ("qwen2", {"layer_types": [3]}),
    ],
)
def test_values_that_families_compute_with(name: str, changes: dict[str, object]):
    family = FAMILIES[name]
    hub, task = family.hub_config(family.template)
    with pytest.raises(InputError, match=r"config.json: "):
        family.config({**hub, **changes}, task)


@pytest.mark.parametrize(
    ("name", "value"), [("initializer_range", -0.5), ("hidden_size", 2**25), ("vocab_size", 2**62)]
)
def test_values_that_no_config_of_ours_has(copy: Path, tmp_path: Path, name: str, value: float):
    polyformer.from_pretrained(copy).save_pretrained(tmp_path / "own")
    assert f"{name}: expected" in fails(edited(tmp_path / "own", **{name: value}))
