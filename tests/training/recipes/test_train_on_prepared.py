"""Runs on prepared text: the same rows as from memory, resumed in the middle of an epoch, refused by name."""

import json
from pathlib import Path

import pytest

from polyformer.cli.main import main
from polyformer.core.errors import InputError
from polyformer.data import load
from polyformer.data.prepared.rows import MappedBatches
from polyformer.training.recipes import Recipe
from polyformer.training.recipes.fit import fit
from tiny_recipes import TEXT, tiny_recipe

TASK = {"ngram_order": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lines as prepared text, a quarter of them held out."""
    place = tmp_path_factory.mktemp("text")
    (place / "notes.txt").write_text(TEXT)
    words = ["--tokenizer", "train", "--algorithm", "bytes", "--format", "lines", "--validation", "0.25"]
    words += ["--shard-tokens", "300", "--out", str(place / "P")]
    assert main(["data", "prepare", str(place / "notes.txt"), *words]) == 0
    return place / "P"


def losses(folder: Path) -> list[tuple[int, float]]:
    """Steps and training losses of a run."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in rows if "loss" in row]


def recipe(folder: Path, steps: int = 6, **changes) -> Recipe:
    changes = {"task": TASK, "schedule": "constant", "training": {"reporting": {"log_every": 1}}, **changes}
    return tiny_recipe(folder, steps, data={"path": str(folder), "format": None}, **changes)


def test_a_run_reads_the_rows_and_the_held_out_text_of_memory(folder: Path, tmp_path: Path):
    mapped = fit(recipe(folder), tmp_path / "mapped")
    whole = fit(tiny_recipe(folder.parent / "notes.txt", 6, task=TASK), tmp_path / "whole")
    assert mapped.scores["validation"].keys() == whole.scores["validation"].keys()
    ours, theirs = (fitted.task.rows.held_out(fitted.splits.validation) for fitted in (mapped, whole))
    assert ours.counts == theirs.counts
    assert [row["labels"].tolist() for row in ours.batches.rows] == [
        row["labels"].tolist() for row in theirs.batches.rows
    ]
    batches = [fitted.task.rows.training_batches(fitted.splits.train, 0) for fitted in (mapped, whole)]
    assert isinstance(batches[0], MappedBatches)
    rows = [sorted(row for _, b in each.epoch(0) for row in b["labels"].tolist()) for each in batches]
    assert rows[0] == rows[1]


def test_a_run_is_resumed_in_the_middle_of_an_epoch(folder: Path, tmp_path: Path, capsys, complaint):
    fit(recipe(folder), tmp_path / "whole")
    fit(recipe(folder, 4), tmp_path / "parts")
    fit(recipe(folder), tmp_path / "parts", resume=True)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert main(["evaluate", str(tmp_path / "parts"), "--device", "cpu"]) == 0
    assert "validation" in capsys.readouterr().out
    file = folder / "train-00000.tokens"
    size = file.stat().st_size
    file.rename(file.with_suffix(".away"))
    try:
        assert f"{file}: damaged: it is missing" in complaint("train", "--resume", tmp_path / "parts")
    finally:
        file.with_suffix(".away").rename(file)
    assert file.stat().st_size == size


@pytest.mark.parametrize("feed", ["in_order", "mlm", "mixture"])
def test_other_ways_to_read_it(folder: Path, tmp_path: Path, feed: str):
    if feed == "mixture":
        (tmp_path / "mix.yaml").write_text(f"{folder}: 0.7\n")
        fitted = fit(recipe(tmp_path / "mix.yaml"), tmp_path / "run")
    elif feed == "mlm":
        words = [
            "--tokenizer",
            "train",
            "--algorithm",
            "wordpiece",
            "--vocab-size",
            "100",
            "--format",
            "lines",
        ]
        prepare = ["data", "prepare", str(folder.parent / "notes.txt"), "--validation", "0.25"]
        assert main([*prepare, *words, "--out", str(tmp_path / "P")]) == 0
        task = {"kind": "mlm", "row_length": 16, "batch_tokens": 64}
        model = {"preset": "encoder-tiny", "hidden_size": 16, "num_hidden_layers": 1}
        tokenizer = {"algorithm": "wordpiece"}
        fitted = fit(recipe(tmp_path / "P", task=task, model=model, tokenizer=tokenizer), tmp_path / "run")
    else:
        task = {**TASK, "feed": "in_order"}
        model = {"memory": {"kind": "recurrent", "length": 8}, "position": "transformer_xl"}
        fitted = fit(recipe(folder, task=task, model=model), tmp_path / "run")
    assert 0 < fitted.scores["validation"]["loss"] < 20


def test_a_guess_and_a_named_recipe_take_the_folder(folder: Path, tmp_path: Path, capsys):
    for name in ([], ["wikitext2"]):
        assert main(["train", *name, "--data", str(folder), "--print"]) == 0
        text = capsys.readouterr().out
        data = Recipe.from_yaml(text).data
        assert data.path == str(folder)
        assert data.validation is None
        assert Recipe.from_yaml(text).task.to_dict()["ngram_order"] == 0
    assert "guessed" not in text


def test_prepared_text_for_another_task_is_refused(folder: Path, tmp_path: Path):
    def refused(message: str, **changes) -> None:
        with pytest.raises(InputError, match=message):
            fit(recipe(folder, **changes), tmp_path / "run")
        assert not (tmp_path / "run" / "recipe.yaml").exists()

    refused("ngram_order: n-grams are counted in memory", task={"ngram_order": 2})
    other = tmp_path / "tokenizer"
    from polyformer.data import Tokenizer, TokenizerConfig

    Tokenizer.train(TokenizerConfig(algorithm="characters"), ["abc"]).save(other)
    refused("not the tokenizer that .*P was prepared with", tokenizer={"path": str(other)})
    with pytest.raises(InputError, match="prepared text, and this task needs text, label"):
        load(recipe(folder).data, ("text", "label"))
    with pytest.raises(InputError, match=r"test_fraction: .*P is prepared text"):
        load(Recipe.from_dict({"data": {"path": str(folder), "test_fraction": 0.1}}).data, ("text",))
