"""LLaDA by its released configuration; a tiny model is Llama's of transformers with a mask of zeros."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import polyformer
from polyformer.cli.main import main
from polyformer.core.errors import InputError
from polyformer.data import Tokenizer, TokenizerConfig
from polyformer.models.architectures import Transformer
from polyformer.models.checkpoints import FAMILIES

os.environ["TRANSFORMERS_VERBOSITY"] = "error"

RELEASED: dict[str, Any] = {
    **{"activation_type": "silu", "alibi": False, "alibi_bias_max": 8.0, "attention_dropout": 0.0},
    **{"architectures": ["LLaDAModelLM"], "attention_layer_norm": False, "bias_for_layer_norm": False},
    **{"attention_layer_norm_with_affine": True, "block_group_size": 1, "block_type": "llama"},
    **{"d_model": 4096, "embedding_dropout": 0.0, "embedding_size": 126464, "eos_token_id": 126081},
    **{
        "flash_attention": False,
        "include_bias": False,
        "include_qkv_bias": False,
        "init_cutoff_factor": None,
    },
    **{"init_device": "meta", "init_fn": "mitchell", "init_std": 0.02, "input_emb_norm": False},
    **{"layer_norm_type": "rms", "layer_norm_with_affine": True, "mask_token_id": 126336},
    **{"max_sequence_length": 4096, "mlp_hidden_size": 12288, "mlp_ratio": 4, "model_type": "llada"},
    **{"multi_query_attention": None, "n_heads": 32, "n_kv_heads": 32, "n_layers": 32},
    **{"pad_token_id": 126081, "precision": "amp_bf16", "residual_dropout": 0.0, "rms_norm_eps": 1e-5},
    **{"rope": True, "rope_full_precision": True, "rope_theta": 500000.0, "scale_logits": False},
    **{"use_cache": False, "vocab_size": 126464, "weight_tying": False},
}
"""The options of the model with 8B parameters."""
SIZES = {"d_model": 24, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "mlp_hidden_size": 20}
TINY: dict[str, Any] = {
    **RELEASED,
    **SIZES,
    **{"vocab_size": 260, "embedding_size": 260, "max_sequence_length": 64, "mask_token_id": 259},
    **{"pad_token_id": 256, "eos_token_id": 258, "rope_theta": 500.0},
}
NAMES = {
    "model.embed_tokens": "model.transformer.wte",
    "model.norm": "model.transformer.ln_f",
    "lm_head": "model.transformer.ff_out",
    "self_attn.q_proj": "q_proj",
    "self_attn.k_proj": "k_proj",
    "self_attn.v_proj": "v_proj",
    "self_attn.o_proj": "attn_out",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ff_norm",
}
"""Modules of transformers' Llama by LLaDA's names."""


def renamed(key: str) -> str:
    module, _, ending = key.rpartition(".")
    for theirs, ours in NAMES.items():
        if module == theirs or (module.endswith(f".{theirs}") and theirs != "model.norm"):
            module = module.removesuffix(theirs) + ours
            break
    return f"{module.replace('model.layers', 'model.transformer.blocks')}.{ending}"


def tiny_llama() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=260,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=20,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    model = transformers.LlamaForCausalLM(config).double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) / 4)
    return model


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny_llama()


@pytest.fixture
def folder(llama: Any, tmp_path: Path) -> Path:
    """A checkpoint of LLaDA with the weights of the Llama, and a tokenizer of bytes."""
    path = tmp_path / "llada"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(TINY))
    weights = {renamed(key): x.clone() for key, x in llama.state_dict().items()}
    assert len(weights) == len(llama.state_dict())
    save_file(weights, path / "model.safetensors")
    Tokenizer.train(TokenizerConfig(algorithm="bytes"), []).save(path)
    return path


def test_the_released_configuration_is_written_as_it_was():
    family = FAMILIES["llada"]
    config = family.config(RELEASED, "ModelLM")
    hub, _ = family.hub_config(config)
    assert {name: hub.get(name) for name in RELEASED} == RELEASED
    with torch.device("meta"):
        model = Transformer(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == 8_015_581_184
    assert config.to_dict() | {"origin": None} == polyformer.model_config("llada-8b").to_dict()


@torch.no_grad()
def test_logits_are_those_of_llama_with_a_mask_of_zeros(llama: Any, folder: Path):
    """All tokens see all others: transformers adds a given mask of four axes to the scores as it is."""
    model = polyformer.from_pretrained(folder, dtype=torch.float64)
    ids = torch.randint(260, (3, 17), generator=torch.Generator().manual_seed(1))
    expected = llama(ids, attention_mask=torch.zeros(3, 1, 17, 17, dtype=torch.double)).logits
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(llama(ids).logits, expected, atol=1e-2), "a causal mask differs"


def test_it_is_saved_back_bitwise(folder: Path, tmp_path: Path):
    model = polyformer.from_pretrained(folder, dtype=torch.float64)
    model.save_pretrained(tmp_path / "again", format="hub")
    again, before = (load_file(path / "model.safetensors") for path in (tmp_path / "again", folder))
    assert again.keys() == before.keys()
    assert all(torch.equal(again[name], before[name]) for name in before)
    hub = json.loads((tmp_path / "again" / "config.json").read_text())
    assert {name: hub.get(name) for name in TINY} == TINY


def test_a_checkpoint_writes_by_filling_masks(folder: Path, capsys: pytest.CaptureFixture[str]):
    asked = ["--max-new-tokens", "6", "--denoising-steps", "3", "--device", "cpu"]
    assert main(["generate", str(folder), "--prompt", "ab", *asked]) == 0
    text = capsys.readouterr().out
    loaded = polyformer.load(folder, device="cpu")
    assert loaded.generate("ab", max_new_tokens=6, denoising_steps=3) == text.removesuffix("\n")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("block_type", "sequential", "block_type is 'sequential', and only 'llama' is supported"),
        ("include_bias", True, "include_bias is True, and only False is supported"),
        ("embedding_size", 300, "embedding_size is 300, expected vocab_size 260"),
        ("mask_token_id", "x", "mask_token_id is 'x', expected"),
    ],
)
def test_other_options_are_refused(name: str, value: Any, message: str):
    with pytest.raises(InputError, match=message):
        FAMILIES["llada"].config({**TINY, name: value}, "ModelLM")
