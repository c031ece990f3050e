"""T5's mixture: rows of all parts, their prefixes, metrics of each, runs that go on, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from polyformer import InputError
from polyformer.data import TokenizerConfig
from polyformer.models.architectures import Transformer
from polyformer.models.presets import model_config
from polyformer.training.recipes import Recipe, fit
from polyformer.training.recipes.recipe import find_recipe
from polyformer.training.tasks import TextToText, TextToTextConfig
from polyformer.training.tasks.text_to_text import measured

PARTS: dict[str, Any] = {
    "mood": {
        "prefix": "mood: ",
        "words": {"0": "bad", "1": "good"},
        "data": {"path": "mood.tsv", "validation": "mood.tsv", "header": ["source", "target"]},
    },
    "de": {"form": "translate", "prefix": "to German: ", "data": {"path": "pairs.{en,de}"}},
    "short": {"form": "summarize", "data": {"path": "short.jsonl"}},
    "spans": {"form": "spans", "data": {"path": "text.txt", "format": "lines"}},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mood.tsv").write_text("a fine film\t1\ndull\t0\nso dull\t0\n")
    (tmp_path / "pairs.en").write_text("go\n" * 30)
    (tmp_path / "pairs.de").write_text("geh\n" * 30)
    (tmp_path / "short.jsonl").write_text('{"source": "a long text", "target": "a text"}\n' * 4)
    (tmp_path / "text.txt").write_text("some words that stand in a line\n" * 9)
    return tmp_path


def config(folder: Path, **options: Any) -> TextToTextConfig:
    values = {"folder": str(folder), "parts": PARTS, "max_length": 24, "max_target": 8, "batch_tokens": 64}
    return TextToTextConfig.from_dict({**values, **options})


def built(config: TextToTextConfig) -> TextToText:
    return config.build(config.tokenizer(TokenizerConfig(algorithm="bytes"), config.own_data.train))


def tiny(task: TextToText) -> Transformer:
    torch.manual_seed(0)
    return Transformer(task.adapt(model_config("transformer-tiny"))).eval()


def test_rows_have_prefixes_and_words(folder: Path):
    splits = config(folder).own_data
    assert splits.train[0] == {"task": "mood", "source": "mood: a fine film", "target": "good"}
    assert [row["target"] for row in splits.train[:3]] == ["good", "bad", "bad"]
    assert {"task": "de", "source": "to German: go", "target": "geh"} in [*splits.train]
    assert splits.validation is not None
    assert {row["task"] for row in splits.validation} == {*PARTS}
    assert splits.test is None


def test_training_reads_the_mixture(folder: Path):
    """Three tasks as pairs, the fourth with sentinels; nothing that the model does not take."""
    task = built(config(folder, limit=10))
    assert task.notes == []
    batches = task.rows.training_batches(config(folder).own_data.train, seed=1)
    (note,) = task.notes
    assert note.startswith("mixture: mood 11.5% (3 examples), de 38.5% (29 examples)")
    model, sources = tiny(task), set()
    for _, batch in batches.epoch(0):
        assert {*batch} == {"input_ids", "labels", "attention_mask"}
        assert torch.isfinite(task.objective.loss(model, batch))
        sources |= {task.tokenizer.decode(row) for row in batch["input_ids"].tolist()}
        sentinels = {task.rows.sentinels[0]} & {*batch["input_ids"].flatten().tolist()}
        if sentinels:
            assert (batch["labels"] == task.rows.sentinels[0]).any()
            sources.add("spans")
    assert {"mood: dull", "to German: go", "a long text", "spans"} <= sources


def test_metrics_of_each_part(folder: Path, monkeypatch: pytest.MonkeyPatch):
    task = built(config(folder))
    model, rows = tiny(task), config(folder).own_data.validation
    assert rows is not None
    values = task.metrics.measure(model, task.rows.held_out(rows))
    assert {*values} == {"loss", "perplexity", *(f"{name}_loss" for name in PARTS)}
    assert min(values[f"{name}_loss"] for name in PARTS) <= values["loss"]
    assert values == task.metrics.measure(model, task.rows.held_out(rows)), (
        "spans of held-out texts are drawn once"
    )
    with torch.no_grad():
        (only,) = task.rows.prepare_part("short", [row for row in rows if row["task"] == "short"])
        loss = model(torch.tensor([only["input_ids"]]), labels=torch.tensor([only["labels"]])).loss
    assert values["short_loss"] == pytest.approx(float(loss), rel=1e-5)
    targets = {row["source"]: row["target"] for row in rows}
    monkeypatch.setattr(task, "translate", lambda model, texts: [targets[text] for text in texts])
    scores = task.finish(model, rows)
    assert scores["mood_accuracy"] == 1.0
    assert scores["mood_majority"] == pytest.approx(2 / 3)
    assert scores["short_rougeL"] == pytest.approx(100)
    assert "de_bleu" in scores


def test_a_label_is_right_letter_for_letter():
    assert measured("classify", ["good", "Good"], ["good", "good"]) == {"accuracy": 0.5, "majority": 1.0}


def test_long_texts_are_cut(folder: Path):
    task = built(config(folder, max_length=4, max_target=3))
    (row,) = task.rows.prepare_part("de", [{"source": "abcdef", "target": "abcdef"}])
    assert task.tokenizer.decode(row["input_ids"]) == "abc"
    assert task.tokenizer.decode(row["labels"]) == "abc"
    assert task.rows.max_generated(100) == 3


def recipe(folder: Path) -> Recipe:
    return Recipe.from_dict(
        {
            "task": config(folder).to_dict(),
            "model": {"preset": "transformer-tiny", "hidden_size": 8, "dropout": 0.1},
            "tokenizer": {"algorithm": "bytes"},
            "training": {"steps": 24, "engine": {"device": "cpu"}, "saving": {"checkpoint_every": 8}},
        }
    )


def test_a_run_goes_on_as_if_it_had_not_stopped(folder: Path, tmp_path: Path):
    whole = fit(recipe(folder), tmp_path / "whole")
    assert whole.scores["validation"]["mood_accuracy"] >= 0
    again = fit(recipe(folder), tmp_path / "whole", resume=True, from_step=16)
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, again.model.state_dict()[name]), name
    (folder / "mood.tsv").write_text("a fine film\t1\ndull\t0\nso fine\t1\n")
    with pytest.raises(InputError, match=r"data: changed since .*mood\.tsv: other content"):
        fit(recipe(folder), tmp_path / "whole", resume=True)


def test_the_recipe_of_the_package_is_one():
    task = Recipe.from_dict(find_recipe("t5")).task
    assert isinstance(task, TextToTextConfig)
    assert [part.form for part in task.parts.values()] == ["classify", "translate", "summarize", "spans"]


def test_parts_without_words_or_files_are_refused(folder: Path):
    with pytest.raises(InputError, match=r"parts\.a\.words: no word for '0'"):
        _ = config(folder, parts={"a": {**PARTS["mood"], "words": {"1": "good"}}}).own_data
    with pytest.raises(InputError, match="expected data with a path, read in memory"):
        _ = config(folder, parts={"a": {"prefix": "x"}}).own_data
    with pytest.raises(InputError, match=r"none\.tsv: no such file"):
        _ = config(folder, parts={"a": {"data": {"path": "none.tsv"}}}).own_data
