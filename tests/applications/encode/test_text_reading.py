"""Folders that sentence-transformers writes: our vectors are those of the library, whatever the settings."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from polyformer.applications.encoder import Encoder
from polyformer.core.errors import InputError

sentence_transformers = pytest.importorskip("sentence_transformers")
transformers = pytest.importorskip("transformers")

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    *"abcdefghijklmnopqrstuvwxyz:",
    "The",
    "the",
    "Cat",
    "cat",
]
WORDS += ["sat", "query", "text", *(f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz")]
TEXTS = ["The Cat sat", "the cat sat on the mat and on the other mat " * 3, "CAT", ""]
PROMPTS = {"query": "query: ", "document": "The text: "}
CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny random BERT with pooling, written by the library; 48 positions, a vocabulary with capitals."""
    bert, target = tmp_path / "bert", tmp_path / "sentence"
    sizes = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=len(WORDS), max_position_embeddings=48, **sizes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.BertModel(config)
        for parameter in model.parameters():
            parameter.data.normal_(std=0.3)
    model.save_pretrained(bert)
    vocab = {word: number for number, word in enumerate(WORDS)}
    transformers.BertTokenizer(vocab=vocab, do_lower_case=False).save_pretrained(bert)
    from sentence_transformers.base.modules import Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    parts = [Transformer(str(bert)), Pooling(12, "mean"), Normalize()]
    sentence_transformers.SentenceTransformer(modules=parts, device="cpu", prompts=PROMPTS).save(str(target))
    return target


def changed(folder: Path, file: str, **settings: Any) -> None:
    path = folder / file
    old = json.loads(path.read_text()) if path.is_file() else {}
    new = {name: value for name, value in {**old, **settings}.items() if value is not None}
    path.write_text(json.dumps(new))


def same(folder: Path, prompt_name: str | None = None) -> None:
    theirs = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    named: dict[str, Any] = {} if prompt_name is None else {"prompt_name": prompt_name}
    expected = theirs.encode(TEXTS, **named)
    vectors = Encoder(folder, CPU, **named).vectors(TEXTS).vectors.numpy()
    assert np.abs(vectors - expected).max() < 1e-6


@pytest.mark.parametrize("limit", [5, 20, 200, 1e30, None])
def test_the_length_of_the_tokenizer(folder: Path, limit: float | None):
    changed(folder, "tokenizer_config.json", model_max_length=limit)
    same(folder)


@pytest.mark.parametrize("file", ["sentence_bert_config.json", "sentence_roberta_config.json"])
def test_the_length_and_the_case_of_the_module(folder: Path, file: str):
    (folder / "sentence_bert_config.json").unlink()
    changed(folder, "tokenizer_config.json", model_max_length=30)
    changed(folder, file, max_seq_length=9)
    same(folder)
    changed(folder, file, max_seq_length=None, do_lower_case=True)
    same(folder)


@pytest.mark.parametrize("name", [None, "query", "document"])
@pytest.mark.parametrize("default", [None, "query", "document"])
def test_prompts(folder: Path, default: str | None, name: str | None):
    changed(folder, "config_sentence_transformers.json", prompts=PROMPTS, default_prompt_name=default)
    same(folder, name)


def test_unknown_prompts_and_poolings_without_them(folder: Path):
    with pytest.raises(
        InputError, match=r"unknown prompt of .* 'passage': expected one of 'document', 'query'"
    ):
        Encoder(folder, CPU, prompt_name="passage")
    changed(folder, "1_Pooling/config.json", include_prompt=False)
    Encoder(folder, CPU)
    with pytest.raises(InputError, match=r"leaves the prompt 'query: ' out \(include_prompt\)"):
        Encoder(folder, CPU, prompt_name="query")


def test_settings_are_part_of_the_fingerprint(folder: Path):
    plain = Encoder(folder, CPU).fingerprint
    assert Encoder(folder, CPU, prompt_name="query").fingerprint != plain
    changed(folder, "sentence_bert_config.json", do_lower_case=True)
    assert Encoder(folder, CPU).fingerprint != plain
