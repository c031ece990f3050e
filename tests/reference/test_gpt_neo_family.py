"""GPT-Neo with every head, loaded from transformers' files and saved back."""

import os
from typing import Any

import pytest
import torch

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
transformers = pytest.importorskip("transformers")

from decoders import (  # noqa: E402
    Double,
    counts,
    read_config,
    verify_decoder,
    verify_writer,
)
from families import shaken  # noqa: E402
from transformers.models.gpt_neo import modeling_gpt_neo  # noqa: E402

import polyformer  # noqa: E402
from polyformer.core.errors import InputError  # noqa: E402
from polyformer.model import Transformer  # noqa: E402
from polyformer.presets import MODELS  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 23,
    "hidden_size": 12,
    "num_layers": 2,
    "num_heads": 3,
    "max_position_embeddings": 19,
    "window_size": 4,
    "attention_types": [[["global", "local"], 1]],
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS: list[dict[str, Any]] = [
    {},
    {
        "num_layers": 3,
        "attention_types": [[["local"], 2], [["global"], 1]],
        "intermediate_size": 20,
        "activation_function": "relu",
        "layer_norm_epsilon": 1e-3,
        "tie_word_embeddings": False,
    },
    {"attention_types": [[["global"], 2]], "window_size": 2, "resid_dropout": 0.2, "attention_dropout": 0.3},
    {"attention_types": [[["local"], 2]], "window_size": 2, "embed_dropout": 0.1},
]
HEADS: dict[str, Any] = {
    "GPTNeoForCausalLM": ({}, {}),
    "GPTNeoModel": ({}, {}),
    "GPTNeoForSequenceClassification": ({"num_labels": 3}, {"labels": {"labels": torch.tensor([2, 0, 1])}}),
    "GPTNeoForTokenClassification": (
        {"num_labels": 4, "classifier_dropout": 0.3},
        {"labels": {"labels": torch.arange(33).view(3, 11) % 4}},
    ),
    "GPTNeoForQuestionAnswering": ({}, {}),
}


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    monkeypatch.setattr(modeling_gpt_neo, "torch", Double())


def their_model(head: str, config: int, **options: Any) -> Any:
    torch.manual_seed(7)
    chosen = {**SIZES, **CONFIGS[config], **options}
    return getattr(transformers, head)(transformers.GPTNeoConfig(**chosen))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("config", range(len(CONFIGS)))
@pytest.mark.parametrize("head", HEADS)
def test_gpt_neo(head: str, config: int, side: str, tmp_path):
    options, labels = HEADS[head]
    verify_decoder(their_model(head, config, **options), tmp_path, side, **labels)


@pytest.mark.parametrize("config", range(len(CONFIGS)))
def test_weights_chunks_and_texts_are_the_same(config: int, tmp_path):
    verify_writer(their_model("GPTNeoForCausalLM", config, attn_implementation="eager"), tmp_path)


@pytest.mark.parametrize("backend", ["tiled", "sdpa", "definition"])
def test_local_layers_are_local_in_every_backend(backend: str, tmp_path):
    """A token 4 places away changes what a stack of one local layer says, no other: there the window ends."""
    options = {"num_layers": 1, "attention_types": [[["local"], 1]], "window_size": 5}
    theirs: Any = shaken(their_model("GPTNeoForCausalLM", 0, **options), 0.8)
    theirs.save_pretrained(tmp_path)
    ours = polyformer.from_pretrained(tmp_path)
    same_weights = Transformer(ours.config.override("backend", backend)).double().eval()
    same_weights.load_state_dict(ours.state_dict())
    ids = torch.arange(3, 17).unsqueeze(0)
    expected = theirs(ids).logits
    torch.testing.assert_close(same_weights(ids).logits, expected, rtol=1e-10, atol=1e-10)
    changed = ids.clone()
    changed[0, 6] = 20
    moved = (same_weights(changed).logits - expected).abs().amax(-1)[0] > 1e-9
    assert moved.nonzero().flatten().tolist() == [6, 7, 8, 9, 10]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_layers": ["global", "wide"]}, "unknown attention_types 'wide'"),
        ({"attention_layers": ["global"]}, "config.json: attention_types has 1 layers, and num_layers 2"),
        ({"window_size": 1}, "config.json: window_size is 1; expected 2 or more"),
    ],
)
def test_what_is_not_computed_is_named(options: dict[str, Any], message: str):
    with pytest.raises(InputError) as caught:
        read_config(transformers.GPTNeoConfig(**SIZES), **options)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("name", "sizes", "parameters"),
    [
        ("gpt-neo-125m", (12, 768, 12), 125_198_592),
        ("gpt-neo-1.3b", (24, 2048, 16), 1_315_575_808),
        ("gpt-neo-2.7b", (32, 2560, 20), 2_651_307_520),
    ],
)
def test_sizes(name: str, sizes: tuple[int, int, int], parameters: int):
    layers, width, heads = sizes
    theirs = transformers.GPTNeoConfig(
        num_layers=layers,
        hidden_size=width,
        num_heads=heads,
        max_position_embeddings=2048,
        attention_types=[[["global", "local"], layers // 2]],
    )
    assert counts(name, theirs) == (parameters, parameters)
    assert MODELS[name]().decoder == read_config(theirs).decoder
