"""Extractive summarization: the labels, the layout of a text, and the chosen sentences."""

from pathlib import Path
from typing import Any

import pytest
import torch

from polyformer.cli.main import main
from polyformer.core.host_values import IGNORED
from polyformer.data import TokenizerConfig
from polyformer.models.architectures import Transformer
from polyformer.models.presets import model_config
from polyformer.training.recipes import Recipe, fit
from polyformer.training.tasks import ExtractConfig, Extraction
from polyformer.training.tasks.tag import distinct, oracle

pytest.importorskip("rouge_score")

SENTENCES = [
    "The river was high in spring.",
    "A boat with nine men came from the north.",
    "Nobody saw the men again.",
    "Bread was cheap that year.",
]
ROWS = [{"source": " ".join(SENTENCES), "target": "A boat with nine men came and nobody saw them again."}]


def build(**options: Any) -> tuple[Extraction, Transformer]:
    config = ExtractConfig(max_length=64, batch_tokens=128, **options)
    task = config.build(config.tokenizer(TokenizerConfig(algorithm="wordpiece", vocab_size=120), ROWS))
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    return task, Transformer(task.adapt(model_config("bertsum-small", sizes))).eval()


def test_labels_are_the_sentences_that_raise_the_score():
    assert oracle(SENTENCES, ROWS[0]["target"], 3) == [1, 2]
    assert oracle(SENTENCES, ROWS[0]["target"], 1) == [1]
    assert oracle(SENTENCES, "Nothing of it", 3) == []
    assert oracle([], "Nothing.", 3) == []


def test_a_sentence_has_its_own_first_token_type_and_label():
    task, _ = build()
    (row,) = task.rows.prepare(ROWS)
    starts = [place for place, token in enumerate(row["input_ids"]) if token == task.rows.cls]
    assert [row["labels"][place] for place in starts] == [0, 1, 1, 0]
    assert [row["token_type_ids"][place] for place in starts] == [0, 1, 0, 1]
    assert {label for place, label in enumerate(row["labels"]) if place not in starts} == {IGNORED}
    assert row["input_ids"].count(task.rows.sep) == 4


def test_only_whole_sentences_are_read_except_a_long_first():
    task, _ = build()
    long = " ".join(["The river was high in spring and the men of the north came by boat."] * 9)
    sentences, row = task.rows.read(long)
    assert 1 <= len(sentences) < 9
    assert len(row["input_ids"]) <= 64
    sentences, row = task.rows.read("river " * 200)
    assert len(sentences) == 1
    assert (len(row["input_ids"]), row["input_ids"][-1]) == (64, task.rows.sep)


def test_a_model_learns_which_sentences_are_the_summary():
    task, model = build(sentences=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    ((_, batch),) = task.rows.training_batches(ROWS, seed=0).epoch(0)
    for _ in range(40):
        optimizer.zero_grad()
        loss = task.objective.loss(model, batch)
        loss.backward()
        optimizer.step()
    assert task.extract(model, [ROWS[0]["source"], ""]) == [f"{SENTENCES[1]} {SENTENCES[2]}", ""]
    scores = task.score(model, ROWS)
    assert scores["rouge1"] == scores["oracle_rouge1"] > scores["lead3_rouge1"]
    assert scores["loss"] < 0.1


def test_sentences_with_three_shared_words_are_left_out():
    texts = ["the men of the north came", "men of the north left", "a boat"]
    assert distinct(texts, [1, 0, 2], 3) == [texts[1], texts[2]]
    assert distinct(texts, [2, 0, 1], 1) == [texts[2]]


def test_a_run_prints_the_sentences(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "pairs.csv").write_text("source,target\n" + f"{ROWS[0]['source']},{ROWS[0]['target']}\n" * 8)
    recipe = {
        "task": {"kind": "extract", "max_length": 64, "batch_tokens": 128, "sentences": 1},
        "model": {"preset": "bertsum-small", "hidden_size": 16, "num_hidden_layers": 1},
        "data": {"path": str(tmp_path / "pairs.csv"), "validation_fraction": 0.2},
        "tokenizer": {"algorithm": "wordpiece", "vocab_size": 120},
        "training": {"steps": 1, "engine": {"device": "cpu"}},
    }
    fit(Recipe.from_dict(recipe), tmp_path / "run")
    assert main(["translate", str(tmp_path / "run"), ROWS[0]["source"]]) == 0
    assert capsys.readouterr().out.splitlines()[-1] in SENTENCES
    assert main(["translate", str(tmp_path / "run"), "A text.", "--num-beams", "2"]) == 2
    assert "sentences are chosen, not generated; leave out --num-beams" in capsys.readouterr().err
