"""A head, and an attention to convert to, are named in the ways of every part."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import polyformer
from polyformer import InputError, Window
from polyformer.attention.mechanisms import LSHConfig, SoftmaxConfig
from polyformer.models.checkpoints import convert
from polyformer.models.presets import create_model
from polyformer.nn.heads import ClassifyConfig

SIZES: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 60,
    "max_position_embeddings": 24,
}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    create_model("bert-base", **SIZES).save_pretrained(folder, format="hub")
    return folder


@pytest.mark.parametrize(
    "head", ["classify(num_labels=3)", {"kind": "classify", "num_labels": 3}, ClassifyConfig(num_labels=3)]
)
def test_a_head_is_named_in_every_way(bert: Path, head: Any):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "not in the checkpoint, newly initialized")
        model = polyformer.from_pretrained(bert, head=head)
    assert model.config.head == ClassifyConfig(num_labels=3)


def test_what_no_head_is_called_is_said(bert: Path):
    with pytest.raises(InputError, match="unknown kind of head 'clasify': did you mean 'classify'"):
        polyformer.from_pretrained(bert, head={"kind": "clasify", "num_labels": 3})
    with pytest.raises(InputError, match="unknown option of head 'labels'"):
        polyformer.from_pretrained(bert, head="classify(labels=3)")


@pytest.mark.parametrize(
    ("attention", "expected"),
    [
        ("Window(24)", SoftmaxConfig(pattern=Window(24))),
        ("lsh(buckets=4)", LSHConfig(buckets=4)),
        ({"kind": "lsh", "buckets": 4}, LSHConfig(buckets=4)),
    ],
)
def test_convert_takes_every_way(attention: Any, expected: Any):
    model, _ = convert(create_model("bert-base", **SIZES), attention)
    assert model.config.encoder is not None
    assert model.config.encoder.attention.mechanism == expected
