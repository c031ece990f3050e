"""The folder of a run: what is in it, and what is refused."""

import json
from pathlib import Path

import pytest
import torch

import polyformer
from polyformer import InputError
from polyformer.data import load_tokenizer
from polyformer.models.generation import GenerationConfig
from polyformer.training.machine import choose_device
from polyformer.training.recipes import Run, fit
from polyformer.training.recipes.reader import Writer
from polyformer.training.recipes.run import new_folder, writer
from polyformer.training.tasks import LanguageModelling, Translation
from tiny_recipes import TEXT, tiny_recipe


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "lines.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def folder(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "one"
    fitted = fit(tiny_recipe(text, seed=3), folder)
    assert fitted.scores["validation"].keys() == {"loss", "perplexity", "word_perplexity", "bits_per_byte"}
    return folder


def test_a_run_leaves_everything_behind(folder: Path, text: Path):
    names = {"recipe.yaml", "run.json", "tokenizer.json", "config.json", "model.safetensors", "metrics.csv"}
    assert names <= {path.name for path in folder.iterdir()}
    run = Run.open(folder)
    assert run.recipe == tiny_recipe(text, seed=3)
    record = json.loads((folder / "run.json").read_text())
    assert record["seed"] == 3
    assert record["steps"] == 4
    assert {"polyformer", "torch", "python"} <= record["versions"].keys()
    assert "validation" in record["metrics"]


def test_the_folder_is_a_model_directory(folder: Path):
    model = polyformer.from_pretrained(folder)
    tokenizer = load_tokenizer(folder)
    assert model.config.vocab_size == len(tokenizer)
    assert (
        sum(parameter.numel() for parameter in model.parameters())
        == json.loads((folder / "run.json").read_text())["parameters"]
    )


def test_the_same_recipe_gives_the_same_run(folder: Path, text: Path, tmp_path: Path):
    before = torch.get_rng_state()
    fit(tiny_recipe(text, seed=3), tmp_path / "again")
    for name in ("model.safetensors", "tokenizer.json", "recipe.yaml"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()
    del before  # the loop seeds the global state of every step; only initial weights are drawn apart


def test_a_run_goes_on_where_it_stopped(folder: Path, text: Path, tmp_path: Path):
    fit(tiny_recipe(text, seed=3), tmp_path / "part")
    for late in (tmp_path / "part" / "checkpoints").glob("*4"):
        for file in late.iterdir():
            file.unlink()
        late.rmdir()
    (tmp_path / "part" / "model.safetensors").unlink()
    fit(tiny_recipe(text, seed=3), tmp_path / "part", resume=True)
    assert (tmp_path / "part" / "model.safetensors").read_bytes() == (
        folder / "model.safetensors"
    ).read_bytes()


def test_a_folder_with_a_run_is_not_overwritten(folder: Path, text: Path):
    with pytest.raises(InputError, match="already holds a run; continue it with --resume"):
        fit(tiny_recipe(text, seed=3), folder)


def test_a_folder_without_a_recipe_is_no_run(tmp_path: Path, folder: Path):
    with pytest.raises(InputError, match="no such directory"):
        Run.open(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"not a run \(it has no recipe.yaml\)"):
        Run.open(tmp_path)
    with pytest.raises(InputError, match="a run of the task 'lm', which cannot do this"):
        Run.open(folder).task_of(Translation)
    (tmp_path / "recipe.yaml").write_text("task: {kind: lm, row_lenght: 3}")
    with pytest.raises(
        InputError, match=r"recipe.yaml: unknown option of task 'row_lenght': did you mean 'row_length'"
    ):
        _ = Run.open(tmp_path).recipe
    (tmp_path / "recipe.yaml").write_text("task: [")
    with pytest.raises(InputError, match=r"recipe.yaml: .*not YAML"):
        _ = Run.open(tmp_path).recipe


def test_a_saved_model_with_its_tokenizer_writes_too(folder: Path, tmp_path: Path):
    polyformer.from_pretrained(folder).save_pretrained(tmp_path)
    load_tokenizer(folder).save(tmp_path)
    task, model = writer(tmp_path, LanguageModelling, "cpu")
    assert isinstance(task, Writer)
    own = Run.open(folder).task_of(LanguageModelling)
    config = GenerationConfig(max_new_tokens=5)
    assert task.generate(model, "li", config) == own.generate(model, "li", config)
    assert not model.training
    polyformer.create_model("encoder-tiny").save_pretrained(tmp_path / "encoder")
    with pytest.raises(InputError, match="its head is 'classify', which cannot generate; use"):
        writer(tmp_path / "encoder", LanguageModelling, "cpu")


def test_new_folders_are_numbered(tmp_path: Path):
    assert [new_folder("a", tmp_path).name for _ in range(3)] == ["a-1", "a-2", "a-3"]
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="choose another place with --out"):
        new_folder("a", tmp_path / "file")


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto").type == "cpu"
    with pytest.raises(InputError, match="device: 'cuda' was requested, but torch finds no CUDA device"):
        choose_device("cuda")
