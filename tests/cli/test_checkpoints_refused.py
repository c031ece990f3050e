"""What the commands say of a checkpoint that they cannot use."""

import re
from collections.abc import Callable
from pathlib import Path

import checkpoints
import pytest

from polyformer.nn.heads import ClassifyConfig, MaskedConfig, SpanConfig


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            "classify",
            "its head is 'masked', which cannot classify; train one from it by polyformer "
            "train --pretrained .* --task.kind classify",
        ),
        ("tag", "--task.kind tag"),
        ("answer", "--task.kind qa"),
        ("choose", "--task.kind choose"),
        ("generate", "--task.kind lm"),
        ("translate", "--task.kind translate"),
        ("evaluate", "--data is missing: a checkpoint has no validation data"),
    ],
)
def test_a_head_for_something_else(command: str, message: str, tmp_path: Path, complaint: Callable[..., str]):
    checkpoints.save(tmp_path, "bert-base", checkpoints.bert_files(tmp_path), MaskedConfig())
    words = {"answer": [__file__, "What?"], "generate": [], "evaluate": []}.get(command, ["text"])
    assert re.search(message, complaint(command, tmp_path, *words))


def test_a_head_for_another_command(tmp_path: Path, complaint: Callable[..., str]):
    checkpoints.save(tmp_path, "bart-base", checkpoints.byte_files(tmp_path, "bart"))
    assert "which cannot generate; use polyformer translate" in complaint("generate", tmp_path)
    assert "which cannot tag; use polyformer translate" in complaint("tag", tmp_path, "text")
    words = "--source-language", "en", "--target-language", "de"
    assert "knows none such; leave them out" in complaint("translate", tmp_path, "text", *words)


def test_a_text_that_is_too_long(tmp_path: Path, complaint: Callable[..., str]):
    checkpoints.save(
        tmp_path, "bert-base", checkpoints.bert_files(tmp_path), ClassifyConfig(), max_position_embeddings=20
    )
    error = complaint("classify", tmp_path, "a film " * 30)
    assert error.startswith("polyformer: error: text ('a film a film ")
    assert " a film a film ') has 62 tokens" in error
    assert f"takes 20; shorten it, or make a model for more by polyformer convert {tmp_path} OUT" in error
    article = tmp_path / "article.txt"
    article.write_text("A film.")
    folder = checkpoints.save(
        tmp_path, "bert-base", checkpoints.bert_files(tmp_path), SpanConfig(), max_position_embeddings=20
    )
    assert "question: expected at most 20 tokens with its marks, got 6" in complaint(
        "answer", folder, article, "film " * 60
    )


def test_no_tokenizer(tmp_path: Path, complaint: Callable[..., str]):
    checkpoints.save(tmp_path, "bert-base", checkpoints.bert_files(tmp_path), ClassifyConfig())
    (tmp_path / "vocab.txt").unlink()
    assert "no vocab.txt in it, which BertTokenizer needs" in complaint("classify", tmp_path, "text")


def test_no_checkpoint(tmp_path: Path, complaint: Callable[..., str]):
    assert "nowhere: no such directory" in complaint("classify", "nowhere", "text")
    assert "not a model directory (it has no config.json)" in complaint("tag", tmp_path, "text")
    (tmp_path / "config.json").write_text('{"model_type": "jamba"}')
    assert "model_type 'jamba' is not supported" in complaint("translate", tmp_path, "text")
