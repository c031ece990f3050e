"""What one family of decoders has that others do not: files, options and outputs of its own."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import PATCHES, next_tokens
from families import compare_gradients, loaded, same, shaken, texts, verify
from family_inputs import without_effect
from family_table import TABLE, read_config, their_config, their_model
from safetensors.torch import load_file, save_file

import polyformer
from polyformer.attention.mechanisms import LSHConfig
from polyformer.attention.positions.rope_extensions import NtkConfig
from polyformer.core.errors import InputError
from polyformer.models.architectures import Transformer
from polyformer.models.checkpoints import FAMILIES
from polyformer.models.checkpoints.families import gpt
from polyformer.models.checkpoints.load import model_of_tensors
from polyformer.models.checkpoints.save import find_family
from polyformer.models.presets import MODELS, model_config

transformers = pytest.importorskip("transformers")

BASE = {"rope_theta": 500.0}


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("deepseek_v3", "gpt_neo", "llama", "reformer"):
        PATCHES[name](monkeypatch)


def test_a_file_of_gpt2s_trunk_alone_gives_a_language_model(tmp_path: Path):
    """The oldest files: no prefix, masks stored beside the weights, other names of some options."""
    theirs: Any = shaken(their_model("gpt2", "LMHeadModel"))
    theirs.save_pretrained(tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())
    described["num_attention_heads"] = described.pop("n_head")
    (tmp_path / "config.json").write_text(json.dumps(described))
    tensors = {
        name.removeprefix("transformer."): tensor.clone()
        for name, tensor in theirs.state_dict().items()
        if "lm_head" not in name
    }
    tensors |= {f"h.{i}.attn.bias": torch.ones(1, 1, 19, 19) for i in range(2)}
    save_file(tensors, tmp_path / "model.safetensors")
    ids = torch.randint(23, (2, 9))
    same(polyformer.from_pretrained(tmp_path)(ids).logits, theirs(ids).logits)


@pytest.mark.parametrize("backend", ["tiled", "sdpa", "definition"])
def test_local_layers_of_gpt_neo_are_local_in_every_backend(backend: str, tmp_path: Path):
    """A token 4 places away changes what a stack of one local layer says, no other: there the window ends."""
    options = {"num_layers": 1, "attention_types": [[["local"], 1]], "window_size": 5}
    theirs: Any = shaken(their_model("gpt_neo", "ForCausalLM", **options), 0.8)
    ours = loaded(theirs, tmp_path)
    same_weights = Transformer(ours.config.override("backend", backend)).double().eval()
    same_weights.load_state_dict(ours.state_dict())
    ids = torch.arange(3, 17).unsqueeze(0)
    expected = theirs(ids).logits
    same(same_weights(ids).logits, expected)
    changed = ids.clone()
    changed[0, 6] = 20
    moved = (same_weights(changed).logits - expected).abs().amax(-1)[0] > 1e-9
    assert moved.nonzero().flatten().tolist() == [6, 7, 8, 9, 10]


def test_every_number_of_rotated_channels_comes_back():
    for width in (6, 10, 49, 80, 98, 256):
        for rotary_dim in range(2, width + 1, 2):
            assert int(width * gpt.rotary_fraction(rotary_dim, width)) == rotary_dim


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2"])
def test_a_trunk_serves_every_head(name: str, tmp_path: Path):
    """Question answering of Llama and Qwen2 keeps the trunk under another prefix than their other classes."""
    writer = loaded(their_model(name, "ForCausalLM", **TABLE[name].configs[0]), tmp_path / "lm")
    with pytest.warns(UserWarning, match="newly initialized: head.output"):
        answers = polyformer.from_pretrained(tmp_path / "lm", head="ForQuestionAnswering")
    answers.save_pretrained(tmp_path / "qa", format="hub")
    with pytest.warns(UserWarning, match="newly initialized"):
        tags = polyformer.from_pretrained(tmp_path / "qa", head="ForTokenClassification")
    for key, tensor in writer.state_dict().items():
        if not key.startswith("head."):
            assert torch.equal(answers.state_dict()[key], tensor), key
            assert torch.equal(tags.state_dict()[key], tensor), key


def test_older_names_of_rope_options():
    linear = {"rope_type": "linear", "factor": 2.0, **BASE}
    plain = their_config("llama", "ForCausalLM").to_dict()
    old = {name: value for name, value in plain.items() if name != "rope_parameters"}
    for rope_type in ("type", "rope_type"):
        scaling = {rope_type: "linear", "factor": 2.0}
        ours = FAMILIES["llama"].config({**old, "rope_theta": 500.0, "rope_scaling": scaling}, "ForCausalLM")
        assert ours == read_config(their_config("llama", rope_parameters=linear))


def test_older_files_of_qwen2_say_from_which_layer_on_windows_are():
    theirs = their_config("qwen2", **TABLE["qwen2"].configs[0])
    assert read_config(theirs, layer_types="absent") == read_config(theirs)
    assert theirs.layer_types == ["full_attention", "sliding_attention", "sliding_attention"]


def test_every_end_of_a_text(tmp_path: Path):
    """Several ends come back as they were, and generation stops at any of them."""
    theirs = their_model("llama", "ForCausalLM", eos_token_id=[5, 7]).double()
    theirs.generation_config.eos_token_id = [5, 7]
    theirs.save_pretrained(tmp_path)
    for remove in (False, True):
        if remove:
            (tmp_path / "generation_config.json").unlink()
        ours = polyformer.from_pretrained(tmp_path)
        assert ours.config.special.eos == 5
        _, described, _ = find_family(ours.config)
        assert described["eos_token_id"] == [5, 7]
        assert ours.generation is not None
        assert ours.generation["eos_token_id"] == [5, 7]


def test_what_transformers_read_from_gguf_is_an_ordinary_model():
    theirs = their_model("llama", "ForCausalLM")
    theirs.config.quantization_config = {"quant_method": "gguf", "gguf_file": "model.gguf"}
    ours = polyformer.models.checkpoints.from_transformers(theirs)
    _, described, _ = find_family(ours.config)
    assert "quantization_config" not in described


def test_what_no_llama_can_hold_is_named():
    config = model_config("llama-2-7b")
    for path, value in (
        ("decoder.position.extension", NtkConfig(factor=2.0)),
        ("decoder.position.fraction", 0.5),
        ("decoder.attention.bias", ("query",)),
        ("decoder.dropout", 0.1),
    ):
        with pytest.raises(InputError, match=path):
            FAMILIES["llama"].hub_config(config.override(path, value))


def test_what_family_a_model_is_of():
    for pattern, family in (("*lama-*", "llama"), ("smollm2-*", "llama"), ("qwen2-*", "qwen2")):
        assert {find_family(model_config(name))[0].model_type for name in MODELS.names(pattern)} == {family}


@torch.no_grad()
def test_dynamic_angles_are_the_default_ones_up_to_the_trained_length():
    """What the refusal says of it: there `default` may be written in its place."""
    dynamic = {"rope_type": "dynamic", "factor": 2.0, **BASE}
    theirs = their_model("llama", "ForCausalLM", rope_parameters=dynamic).eval()
    ours = polyformer.models.checkpoints.from_transformers(
        their_model("llama", "ForCausalLM", rope_parameters=BASE)
    )
    ids = torch.arange(TABLE["llama"].sizes["max_position_embeddings"])[None]
    same(ours(ids).logits, theirs(ids).logits, 1e-5)


REFORMERS = [*TABLE["reformer"].configs, *TABLE["reformer"].trunks]


@pytest.mark.parametrize("config", REFORMERS)
def test_loss_and_gradients_of_reformer(config: dict[str, Any], tmp_path: Path):
    """Theirs has them in training alone, for texts as long as the grid of positions."""
    shape = {"axial_pos_shape": [3, 4], "max_position_embeddings": 12}
    shape |= {"hidden_dropout_prob": 0.0, "local_attention_probs_dropout_prob": 0.0}
    theirs: Any = shaken(their_model("reformer", "ModelWithLMHead", **config, **shape))
    theirs.loss_function = next_tokens
    ours, inputs = loaded(theirs, tmp_path), texts(23, (12, 12))
    mine, other = (item.train()(**inputs, labels=inputs["input_ids"]) for item in (ours, theirs))
    same(mine.loss, other.loss)
    compare_gradients(ours, mine.loss, theirs, other.loss, without_effect(theirs))


def test_a_reformers_output_is_both_streams_side_by_side(tmp_path: Path):
    ours = verify(their_model("reformer", "Model"), texts(23), tmp_path, hidden=False, gradients=False)
    assert ours(**texts(23)).last_hidden_state.shape == (3, 11, 24)


def test_long_texts_are_hashed(tmp_path: Path):
    """Beyond one chunk a token sees the first chunk and its buckets; loading hashes alike each time."""
    options = {
        "attn_layers": ["lsh"],
        "lsh_attn_chunk_length": 4,
        "lsh_num_chunks_before": 1,
        "num_buckets": 2,
    }
    theirs: Any = shaken(their_model("reformer", "ModelWithLMHead", **options))
    ours, again = loaded(theirs, tmp_path), polyformer.from_pretrained(tmp_path)
    ids = texts(23, (24, 24))["input_ids"]
    same(ours(ids).logits[:, :4], theirs(input_ids=ids[:, :4]).logits)
    assert torch.equal(ours(ids).logits, again(ids).logits)
    weights = ours(ids, output_attentions=True).attentions
    assert weights is not None
    assert int((weights[0] > 0).sum(-1).max()) < 23


def test_buckets_are_kept_as_they_were_given():
    family = FAMILIES["reformer"]
    for option, buckets in (([2, 4], 8), (6, 6), (None, 4)):
        config = family.config({**TABLE["reformer"].sizes, "num_buckets": option}, "ModelWithLMHead")
        assert config.decoder is not None
        mechanism = config.decoder.attention.mechanism.for_layer(1)
        assert isinstance(mechanism, LSHConfig)
        assert mechanism.buckets == buckets
        assert family.hub_config(config)[0]["num_buckets"] == option


def test_a_released_deepseek_predicts_only_the_next_token(tmp_path: Path):
    """Layer 61 of its file predicts a later token, and transformers reads it only for that."""
    theirs: Any = shaken(their_model("deepseek_v3", "ForCausalLM"))
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "model.layers.61.eh_proj.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    ids = texts(23)["input_ids"]
    same(polyformer.from_pretrained(tmp_path)(ids).logits, theirs(ids).logits)
    save_file({**tensors, "model.layers.60.eh_proj.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="unknown tensor in the checkpoint"):
        polyformer.from_pretrained(tmp_path)


def test_two_tensors_of_one_of_ours_have_one_size():
    theirs = their_model("qwen3_5_text", "ForCausalLM")
    tensors, layer = theirs.state_dict(), "model.layers.0.linear_attn"
    joined = torch.cat([tensors[f"{layer}.in_proj_{name}.weight"] for name in "ba"])
    # As many rows together as before.
    tensors |= {f"{layer}.in_proj_b.weight": joined[:3], f"{layer}.in_proj_a.weight": joined[3:]}
    with pytest.raises(
        InputError, match=r"in_proj_b.weight' makes .* of shape \(3, 24\), .* shape \(4, 24\)"
    ):
        model_of_tensors({**theirs.config.to_dict(), "architectures": ["Qwen3_5ForCausalLM"]}, tensors)


def test_older_files_of_nemotron_h_name_their_layers_by_letters():
    """Two of their layers are one of ours, if the second is a feed-forward."""
    theirs = their_config(
        "nemotron_h", "ForCausalLM", layers_block_type=None, hybrid_override_pattern="MM-*EM"
    )
    kinds = ["linear_attention", "linear_attention", "mlp", "full_attention", "moe", "linear_attention"]
    assert theirs.layers_block_type == kinds
    expected = read_config(theirs)
    older = {"layers_block_type": "absent", "layer_types": "absent", "hybrid_override_pattern": "MM-*EM"}
    actual = read_config(theirs, **older)
    assert actual.decoder == expected.decoder
    assert actual.decoder is not None
    layers = range(actual.decoder.num_hidden_layers)
    feedforwards = [actual.decoder.feedforward.for_layer(i).kind for i in layers]
    assert feedforwards == ["none", "dense", "experts", "none"]
    mechanisms = [actual.decoder.attention.mechanism.for_layer(i).kind for i in layers]
    assert mechanisms == ["ssd", "ssd", "softmax", "ssd"]
