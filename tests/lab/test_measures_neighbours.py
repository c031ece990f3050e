"""Measurements with stores of contexts, on texts that repeat themselves."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from polyformer import create_model
from polyformer.data import TokenizerConfig, build_tokenizer
from polyformer.training.tasks import LanguageModelling
from polyformer.training.tasks.text import exp
from polyformer_lab.cells import Cell
from polyformer_lab.measures.nearest_neighbours import (
    beginning,
    datastore,
    mixtures,
    own_log_p,
    perplexity,
    targets,
)
from polyformer_lab.measures.texts import articles

TEXT = "".join(f"{number} green bottles hang on the wall of house {number % 7}\n" for number in range(40))


def test_neighbours_in_a_repeated_text_lower_perplexity(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    torch.manual_seed(0)
    options = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 260}
    create_model("decoder-tiny", num_hidden_layers=1, **options).save_pretrained(tmp_path / "model")
    build_tokenizer(TokenizerConfig(algorithm="bytes"), []).save(tmp_path / "model")
    for name, text in {"train": TEXT * 2, "valid": TEXT[200:700], "test": TEXT[900:1500]}.items():
        (tmp_path / f"{name}.txt.gz").write_bytes(gzip.compress(text.encode()))
    sources = {"model": str(tmp_path / "model"), "text": str(tmp_path)}
    datastore(tmp_path, **sources, characters=1500, length=32)
    assert "an index needs" in capsys.readouterr().out, "for so few entries there is none"
    settings = {**sources, "store": str(tmp_path / "store"), "tokens": 256, "neighbours": [2, 8]}
    half, whole = (
        Cell((), None, tmp_path / f"{share}", None, "nearest-neighbours", {**settings, "share": share}).run()
        for share in (0.5, 1)
    )
    test, *rows = whole
    assert test["test.flat"] < test["test.none"] / 2
    assert [row["neighbours"] for row in rows] == [row["neighbours"] for row in half] == [2, 8]
    assert rows[0]["entries"] >= 1500
    assert half[0]["entries"] == rows[0]["entries"] // 2


def test_the_beginning_of_a_text_ends_with_a_line():
    assert "".join(beginning(iter(["ab\n", "cd\nef\ngh\n"]), 5)) == "ab\ncd\n"
    assert "".join(beginning(iter(["ab\n"]), 5)) == "ab\n"


ARTICLE = (
    " = Article {0} = \n \n The house of number {0} stands in street {1} . \n A river runs there . \n \n"
)


def test_runs_are_mixed_with_the_neighbours_of_the_same_tokens(tmp_path: Path):
    for name, count in (("train", 12), ("valid", 4), ("test", 4)):
        text = "".join(ARTICLE.format(number, number % 3) for number in range(count))
        (tmp_path / f"{name}.txt.gz").write_bytes(gzip.compress(text.encode()))
    articles(tmp_path, str(tmp_path), characters=10 * len(ARTICLE), held_out=2 * len(ARTICLE))
    texts = [json.loads(line)["text"] for line in (tmp_path / "test.jsonl").read_text().splitlines()]
    assert texts == [ARTICLE.format(number, number % 3) for number in range(3)], "in whole articles"
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    recipe = {
        "task": {"kind": "lm", "row_length": 16, "batch_tokens": 64},
        "model": {"preset": "decoder-tiny", "position": "transformer_xl", **sizes},
        "data": {"path": f"{tmp_path}/train.jsonl", "validation": f"{tmp_path}/validation.jsonl"},
        "tokenizer": {"algorithm": "bpe", "vocab_size": 280},
        "training": {"steps": 1},
    }
    options = {"texts": str(tmp_path), "length": 8, "neighbours": 2}
    frozen = Cell((), 0, tmp_path / "frozen", recipe, "neighbours-of-texts", options)
    (row,) = frozen.run()
    in_order = {
        **recipe,
        "task": {**recipe["task"], "feed": "in_order"},
        "model": {**recipe["model"], "memory": "recurrent(length=16)"},
    }
    alone = Cell((), 0, tmp_path / "alone", in_order, "mixtures", {})
    task = alone.fitted.task
    assert isinstance(task, LanguageModelling)
    log_p = own_log_p(alone.fitted, f"{tmp_path}/test.jsonl")
    assert len(log_p) == sum(len(ids) - 1 for ids in task.documents([{"text": text} for text in texts]))
    near = targets(tmp_path / "frozen", log_p, f"{tmp_path}/test.jsonl", (2, row["entries"]), None)
    assert near.shares.shape[:2] == (len(log_p), 2)
    assert exp(float(near.losses(0.0)[0, 0])) == pytest.approx(perplexity(log_p))
    assert near.best()[1] < float(near.losses(0.0)[0, 0]), "the articles are nearly alike"
    own, with_two = mixtures(alone, str(tmp_path), str(tmp_path / "frozen"), [2])
    assert own["perplexity"] == pytest.approx(perplexity(log_p))
    assert with_two["perplexity"] < own["perplexity"]
