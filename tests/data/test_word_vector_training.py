"""Skip-gram and CBOW vectors trained by the command, read back by `train --pretrained-vectors`."""

from pathlib import Path

import pytest

from polyformer.cli.main import main
from polyformer.data.prepared import Settings
from polyformer.data.word_vectors import Sentences, read_word_vectors

TEXT = "The dog sleeps.\nThe cat sleeps!\nA dog barks\n\n" * 20


def test_sentences_are_lines_of_words(tmp_path: Path):
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    names = [str(tmp_path / "a.txt")]
    lines = list(Sentences(names, Settings(tokenizer=""), cased=False))
    assert lines[:3] == [["the", "dog", "sleeps"], ["the", "cat", "sleeps"], ["a", "dog", "barks"]]
    assert len(lines) == 60
    assert next(iter(Sentences(names, Settings(tokenizer=""), cased=True)))[0] == "The"


@pytest.mark.parametrize("algorithm", ["skipgram", "cbow"])
def test_vectors_are_trained_and_read(tmp_path: Path, capsys: pytest.CaptureFixture[str], algorithm: str):
    pytest.importorskip("gensim")
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    out = tmp_path / "v" / "vectors.bin"
    words = ["data", "vectors", str(tmp_path / "a.txt"), "--out", str(out.parent), "--algorithm", algorithm]
    assert main([*words, "--width", "8", "--epochs", "1"]) == 0
    assert "6 vectors of 8 numbers, from 180 words" in capsys.readouterr().out
    first = read_word_vectors(out, {"dog": 3, "cat": 4, "absent": 5})
    assert first.ids.tolist() == [3, 4]
    assert first.width == 8
    assert main([*words, "--width", "8", "--epochs", "1"]) == 0
    assert (read_word_vectors(out, {"dog": 3, "cat": 4}).vectors == first.vectors).all(), "the same seed"
    assert main([*words, "--least", "1000"]) == 2
    assert "no word occurs 1000 times or more" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data", "vectors", "a.txt"], "--out DIR is missing"),
        (
            ["data", "vectors", "a.txt", "--out", "v", "--tokenizer", "train"],
            "not an option of `data vectors`",
        ),
        (["data", "show", "a", "--width", "3"], "--width: not an option of `data show`"),
        (["data", "vectors", "a.txt", "--out", "v", "--algorithm", "glove"], "skipgram"),
    ],
)
def test_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(words) != 0
    assert message in capsys.readouterr().err
