"""GPT-2 with every head, loaded from transformers' files and saved back."""

import json
import os
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
transformers = pytest.importorskip("transformers")

from decoders import counts, read_config, verify_decoder, verify_writer  # noqa: E402
from families import shaken  # noqa: E402

import polyformer  # noqa: E402
from polyformer.core.errors import InputError  # noqa: E402
from polyformer.heads import TagConfig  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 23,
    "n_embd": 12,
    "n_layer": 2,
    "n_head": 3,
    "n_positions": 19,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS: list[dict[str, Any]] = [
    {},
    {"n_inner": 20, "activation_function": "relu", "layer_norm_epsilon": 1e-3, "scale_attn_weights": False},
    {"n_layer": 3, "n_head": 2, "scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": False},
    {
        "scale_attn_by_inverse_layer_idx": True,
        "scale_attn_weights": False,
        "reorder_and_upcast_attn": True,
        "attn_pdrop": 0.3,
    },
]
TOPICS = {"labels": torch.tensor([2, 0, 1])}
TAGS = {"labels": torch.arange(33).view(3, 11) % 4}
HEADS: dict[str, Any] = {
    "GPT2LMHeadModel": ({}, {}),
    "GPT2Model": ({}, {}),
    "GPT2ForSequenceClassification": ({"num_labels": 3}, {"labels": TOPICS}),
    "GPT2ForTokenClassification": ({"num_labels": 4, "classifier_dropout": 0.3}, {"labels": TAGS}),
    "GPT2ForQuestionAnswering": ({}, {}),
}


def their_model(head: str, config: int, **options: Any) -> torch.nn.Module:
    torch.manual_seed(7)
    return getattr(transformers, head)(transformers.GPT2Config(**{**SIZES, **CONFIGS[config], **options}))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("config", range(len(CONFIGS)))
@pytest.mark.parametrize("head", HEADS)
def test_gpt2(head: str, config: int, side: str, tmp_path):
    options, labels = HEADS[head]
    ours = verify_decoder(their_model(head, config, **options), tmp_path, side, **labels)
    if head == "GPT2ForTokenClassification":
        assert ours.config.head == TagConfig(num_labels=4, dropout=0.3)


@pytest.mark.parametrize("config", range(len(CONFIGS)))
def test_weights_chunks_and_texts_are_the_same(config: int, tmp_path):
    exact = {"attn_implementation": "eager", "reorder_and_upcast_attn": False}
    verify_writer(their_model("GPT2LMHeadModel", config, **exact), tmp_path)


def test_a_file_of_the_trunk_alone_gives_a_language_model(tmp_path):
    """The oldest files: no prefix, masks stored beside the weights, other names of some options."""
    theirs: Any = shaken(their_model("GPT2LMHeadModel", 0))
    theirs.save_pretrained(tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())
    described["num_attention_heads"] = described.pop("n_head")
    (tmp_path / "config.json").write_text(json.dumps(described))
    tensors = {
        name.removeprefix("transformer."): tensor.clone() for name, tensor in theirs.state_dict().items()
    }
    tensors |= {f"h.{i}.attn.bias": torch.ones(1, 1, 19, 19) for i in range(2)}
    save_file(
        {name: tensor for name, tensor in tensors.items() if "lm_head" not in name},
        tmp_path / "model.safetensors",
    )
    ids = torch.randint(23, (2, 9))
    torch.testing.assert_close(
        polyformer.from_pretrained(tmp_path)(ids).logits, theirs(ids).logits, rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"add_cross_attention": True}, "config.json: add_cross_attention is True"),
        ({"architectures": ["GPT2NoHead"]}, "unknown architecture of 'gpt2' 'GPT2NoHead'"),
        ({"activation_function": "mish"}, "unknown activation_function 'mish'"),
    ],
)
def test_what_is_not_computed_is_named(options: dict[str, Any], message: str):
    with pytest.raises(InputError) as caught:
        read_config(transformers.GPT2Config(**SIZES), **options)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("name", "sizes", "published"),
    [
        ("gpt2", (12, 768, 12), 124_439_808),
        ("gpt2-medium", (24, 1024, 16), 354_823_168),
        ("gpt2-large", (36, 1280, 20), 774_030_080),
        ("gpt2-xl", (48, 1600, 25), 1_557_611_200),
    ],
)
def test_sizes(name: str, sizes: tuple[int, int, int], published: int):
    options = dict(zip(("n_layer", "n_embd", "n_head"), sizes))
    theirs = transformers.GPT2Config(**options)
    assert counts(name, theirs) == (published, published)
