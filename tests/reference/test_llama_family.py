"""Llama, Mistral and Qwen2 with every head, loaded from transformers' files and saved back."""

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
transformers = pytest.importorskip("transformers")

from decoders import (  # noqa: E402
    Double,
    counts,
    read_config,
    verify_decoder,
    verify_writer,
)
from transformers import modeling_rope_utils  # noqa: E402
from transformers.models.llama import modeling_llama  # noqa: E402
from transformers.models.mistral import modeling_mistral  # noqa: E402
from transformers.models.qwen2 import modeling_qwen2  # noqa: E402

import polyformer  # noqa: E402
from polyformer.checkpoints import FAMILIES  # noqa: E402
from polyformer.checkpoints.save import find_family  # noqa: E402
from polyformer.core.errors import InputError  # noqa: E402
from polyformer.model import Transformer  # noqa: E402
from polyformer.position.rope.context_extension import NtkConfig  # noqa: E402
from polyformer.presets import MODELS, model_config  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 23,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "max_position_embeddings": 19,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BASE = {"rope_theta": 500.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, **BASE}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8,
    "low_freq_factor": 0.5,
    "high_freq_factor": 2.0,
    "original_max_position_embeddings": 16,
    **BASE,
}
GROUPS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
CONFIGS: dict[str, list[dict[str, Any]]] = {
    "Llama": [
        {},
        {**GROUPS, "attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3},
        {
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "rope_parameters": YARN,
            "rms_norm_eps": 1e-3,
        },
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, **BASE}, "hidden_act": "gelu"},
    ],
    "Mistral": [{**GROUPS, "sliding_window": 4, "rope_parameters": BASE}, {"sliding_window": None}],
    "Qwen2": [
        {"rope_parameters": {**YARN, "mscale": 1.2, "mscale_all_dim": 0.7}, "tie_word_embeddings": True},
        {
            **GROUPS,
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 1,
        },
        {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 3, "layer_types": "alternate"},
    ],
}
ALTERNATE = ["sliding_attention", "full_attention"] * 2
CASES = [(family, config) for family in CONFIGS for config in range(len(CONFIGS[family]))]
HEADS: dict[str, Any] = {
    "ForCausalLM": ({}, {}),
    "Model": ({}, {}),
    "ForSequenceClassification": ({"num_labels": 3}, {"labels": {"labels": torch.tensor([2, 0, 1])}}),
    "ForTokenClassification": (
        {"num_labels": 3},
        {"labels": {"labels": torch.arange(33).view(3, 11) % 3}},
    ),
    "ForQuestionAnswering": ({}, {}),
}
MODULES = modeling_llama, modeling_mistral, modeling_qwen2, modeling_rope_utils


class Exact(Double):
    """With their other name of float32, too."""

    float = torch.float64


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    """Their norms, angles and softmax in float64."""
    for module in MODULES:
        monkeypatch.setattr(module, "torch", Exact())


def their_config(family: str, config: int, **options: Any) -> Any:
    chosen = {**SIZES, **CONFIGS[family][config], **options}
    if chosen.get("layer_types") == "alternate":
        chosen["layer_types"] = ALTERNATE
    return getattr(transformers, f"{family}Config")(**chosen)


def their_model(family: str, head: str, config: int, **options: Any) -> Any:
    torch.manual_seed(7)
    model = getattr(transformers, family + head)(their_config(family, config, **options))
    if head == "ForTokenClassification":
        model.loss_function = lambda logits, labels, _: F.cross_entropy(
            logits.flatten(0, 1), labels.flatten()
        )
    return model


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("family", "config"), CASES)
@pytest.mark.parametrize("head", HEADS)
def test_every_class(family: str, head: str, config: int, side: str, tmp_path):
    options, labels = HEADS[head]
    verify_decoder(their_model(family, head, config, **options), tmp_path, side, **labels)


@pytest.mark.parametrize(("family", "config"), CASES)
def test_weights_chunks_and_texts_are_the_same(family: str, config: int, tmp_path):
    verify_writer(their_model(family, "ForCausalLM", config, attn_implementation="eager"), tmp_path)


@pytest.mark.parametrize("family", CONFIGS)
def test_a_trunk_serves_every_head(family: str, tmp_path):
    """Question answering of Llama and Qwen2 keeps the trunk under another prefix than their other classes."""
    their_model(family, "ForCausalLM", 0).save_pretrained(tmp_path / "lm")
    writer = polyformer.from_pretrained(tmp_path / "lm")
    with pytest.warns(UserWarning, match="newly initialized: head.output"):
        answers = polyformer.from_pretrained(tmp_path / "lm", head="ForQuestionAnswering")
    answers.save_pretrained(tmp_path / "qa", format="hub")
    with pytest.warns(UserWarning, match="newly initialized"):
        tags = polyformer.from_pretrained(tmp_path / "qa", head="ForTokenClassification")
    for name, tensor in writer.state_dict().items():
        if not name.startswith("head."):
            assert torch.equal(answers.state_dict()[name], tensor), name
            assert torch.equal(tags.state_dict()[name], tensor), name


def test_older_names_of_rope_options():
    plain = transformers.LlamaConfig(**SIZES)
    old = {name: value for name, value in plain.to_dict().items() if name != "rope_parameters"}
    for rope_type in ("type", "rope_type"):
        scaling = {rope_type: "linear", "factor": 2.0}
        ours = FAMILIES["llama"].config({**old, "rope_theta": 500.0, "rope_scaling": scaling}, "ForCausalLM")
        assert ours == read_config(their_config("Llama", 3), hidden_act="silu")


def test_every_end_of_a_text(tmp_path):
    """Several ends come back as they were, and generation stops at any of them."""
    theirs = their_model("Llama", "ForCausalLM", 0, eos_token_id=[5, 7]).double()
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
    theirs = their_model("Llama", "ForCausalLM", 0)
    theirs.config.quantization_config = {"quant_method": "gguf", "gguf_file": "model.gguf"}
    ours = polyformer.checkpoints.from_transformers(theirs)
    _, described, _ = find_family(ours.config)
    assert "quantization_config" not in described


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        (
            "Llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "config.json: rope_type is 'dynamic', and only default, linear, yarn, llama3 are supported; its "
            "angles change",
        ),
        (
            "Llama",
            {"rope_scaling": {"type": "longrope"}},
            "config.json: rope_type is 'longrope', and only",
        ),
        ("Llama", {"rope_parameters": {"rope_type": ["yarn"]}}, "config.json: rope_type is ['yarn'], and"),
        ("Llama", {"rope_parameters": {"faktor": 2.0}}, "unknown option of rope_parameters 'faktor'"),
        ("Llama", {"rope_parameters": {"rope_type": "linear"}}, "config.json: rope_parameters of type 'lin"),
        (
            "Llama",
            {"rope_parameters": {**LLAMA3, "low_freq_factor": None}},
            "config.json: rope_parameters of type 'llama3' lack 'low_freq_factor'",
        ),
        (
            "Llama",
            {"rope_parameters": {"rope_type": "linear", "factor": "2"}},
            "config.json: factor of rope_parameters is '2', expected a number",
        ),
        ("Llama", {"rope_parameters": {**YARN, "truncate": False}}, "config.json: truncate is False"),
        ("Llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "config.json: partial_rotary_factor"),
        ("Llama", {"rope_parameters": {"rope_theta": True}}, "config.json: rope_theta of rope_param"),
        ("Llama", {"rope_parameters": "yarn"}, "config.json: rope_parameters is 'yarn', expected an object"),
        ("Llama", {"intermediate_size": None}, "config.json: intermediate_size is None, expected"),
        ("Llama", {"eos_token_id": [2, "a"]}, "config.json: eos_token_id is 'a', expected"),
        ("Llama", {"eos_token_id": []}, "config.json: eos_token_id is [], expected"),
        ("Llama", {"hidden_act": "laugh"}, "unknown hidden_act 'laugh'"),
        ("Mistral", {"sliding_window": 1}, "config.json: sliding_window is 1; expected 2 or more, or null"),
        ("Mistral", {"layer_types": ["full_attention"]}, "config.json: layer_types is ['full_attention']"),
        ("Qwen2", {"layer_types": ["full", "full"]}, "unknown layer_types 'full'"),
        ("Qwen2", {"layer_types": ["full_attention"]}, "config.json: layer_types has 1 layers, and num_hid"),
        (
            "Qwen2",
            {"layer_types": ["full_attention", "sliding_attention"]},
            "config.json: sliding_window is None; expected 2 or more for sliding_attention",
        ),
    ],
)
def test_what_is_not_computed_is_named(family: str, options: dict[str, Any], message: str):
    with pytest.raises(InputError) as caught:
        read_config(getattr(transformers, f"{family}Config")(**SIZES), **options)
    assert str(caught.value).startswith(message), caught.value


def test_what_they_cannot_hold_is_named():
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
    families = {name: find_family(model_config(name))[0].model_type for name in MODELS.names("*lama-*")}
    families |= {name: find_family(model_config(name))[0].model_type for name in MODELS.names("smollm2-*")}
    assert set(families.values()) == {"llama"}
    for name, family in (("mistral-7b", "mistral"), ("qwen2-0.5b", "qwen2"), ("qwen2-7b", "qwen2")):
        assert find_family(model_config(name))[0].model_type == family


@pytest.mark.parametrize(
    ("preset", "size"),
    [
        ("llama-7b", 6_738_415_616),
        ("llama-2-7b", 6_738_415_616),
        ("llama-2-70b", 68_976_648_192),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3.2-1b", 1_235_814_400),
        ("mistral-7b", 7_241_732_096),
        ("qwen2-0.5b", 494_032_768),
        ("qwen2-7b", 7_615_616_512),
        ("smollm2-135m", 134_515_008),
        ("smollm2-360m", 361_821_120),
        ("smollm2-1.7b", 1_711_376_384),
    ],
)
def test_sizes(preset: str, size: int):
    """As many parameters as the published checkpoints have."""
    with torch.device("meta"):
        assert sum(p.numel() for p in Transformer(model_config(preset)).parameters()) == size


@pytest.mark.parametrize(("family", "preset"), [("Mistral", "mistral-7b"), ("Llama", "llama-7b")])
def test_defaults(family: str, preset: str):
    theirs = getattr(transformers, f"{family}Config")()
    ours = read_config(theirs)
    assert ours.vocab_size == 32000
    assert counts(preset, theirs)[0] == counts(preset, theirs)[1]
    assert FAMILIES[theirs.model_type].config({}, "ForCausalLM") == ours.override(
        "decoder.attention.head_size", None
    ).override("num_key_value_heads", 8 if family == "Mistral" else None)


def test_defaults_of_qwen2():
    theirs = transformers.Qwen2Config()
    assert FAMILIES["qwen2"].config({}, "ForCausalLM") == read_config(theirs)


@torch.no_grad()
def test_dynamic_angles_are_the_default_ones_up_to_the_trained_length():
    """What the refusal says of it: there `default` may be written in its place."""
    dynamic = {"rope_type": "dynamic", "factor": 2.0, **BASE}
    theirs = their_model("Llama", "ForCausalLM", 0, rope_parameters=dynamic).eval()
    ours = polyformer.checkpoints.from_transformers(
        their_model("Llama", "ForCausalLM", 0, rope_parameters=BASE)
    )
    ids = torch.arange(SIZES["max_position_embeddings"])[None]
    torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=1e-5, atol=1e-5)
