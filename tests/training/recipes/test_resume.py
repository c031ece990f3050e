"""Going on with a run: refusals leave the folder as it was, data are checked, unfinished runs can be used."""

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from polyformer import InputError
from polyformer.cli.main import main
from polyformer.core.files import read_tensors
from polyformer.data import DataConfig
from polyformer.data.sources.checks import data_changes, fingerprint
from polyformer.training.recipes import Recipe, Run, fit
from polyformer.training.recipes.run import first_difference
from tiny_recipes import TEXT, tiny_recipe


def tiny(path: Path, steps: int = 6) -> Recipe:
    """Three checkpoints of six steps."""
    return tiny_recipe(path, steps, training={"saving": {"keep": 3}}, schedule="constant", seed=3)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 steps with its text beside it; checkpoints are those of steps 2, 4 and 6."""
    root = tmp_path_factory.mktemp("finished")
    (root / "lines.txt").write_text(TEXT)
    fit(tiny(root / "lines.txt"), root / "run")
    return root


@pytest.fixture
def begun(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run as a kill after step 4 would have left it; the working directory is its parent."""
    root = Path(shutil.copytree(finished, tmp_path / "copy"))
    monkeypatch.chdir(root)
    run = root / "run"
    shutil.rmtree(run / "checkpoints/step-00000006")
    (run / "model.safetensors").unlink()
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({name: facts[name] for name in ("seed", "versions", "data")}))
    recipe = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(recipe.replace(str(finished), str(root)))
    return run


def contents(folder: Path) -> dict[str, bytes]:
    """Every file and its bytes, and every empty folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else b"a folder"
        for path in folder.rglob("*")
    }


def weights(folder: Path) -> dict[str, Any]:
    return read_tensors(folder / "model.safetensors")


REFUSED: dict[str, tuple[list[str], str]] = {
    "seed": (["--seed", "5"], "seed is 3 there, got 5"),
    "width": (["--model.hidden_size", "64"], "model.hidden_size is 16 there, got 64"),
    "preset": (["--model", "decoder-small"], "model.preset is 'decoder-tiny' there, got 'decoder-small'"),
    "optimizer": (["--optimizer.kind", "sgd"], "optimizer.kind is 'adamw' there, got 'sgd'"),
    "task": (["--task.kind", "mlm"], "task.kind is 'lm' there, got 'mlm'"),
    "batches": (["--task.batch_tokens", "32"], "task.batch_tokens is 64 there, got 32"),
    "tokenizer": (["--tokenizer.algorithm", "words"], "tokenizer.algorithm"),
    "held out": (["--data.validation_fraction", "0.5"], "data.validation_fraction is 0.25 there, got 0.5"),
    "other data": (["--data", "other.txt"], "data: changed since run began: "),
    "no data": (["--data", "nowhere.txt"], "nowhere.txt: no such file"),
    "fewer steps": (["--steps", "3"], "steps: the run in run is already at step 4, got 3"),
    "precision": (["--training.engine.precision", "fp16"], "precision: 'fp16' needs a CUDA device"),
    "no such step": (["--from-step", "3"], "no checkpoint of step 3; it has 2, 4"),
    "folder": (["--out", "elsewhere"], "--resume: the run defines recipe and folder"),
    "option": (["--training.clap", "1"], "unknown option of training 'clap'"),
    "pretrained": (["--pretrained", "."], "polyformer: error: "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_resume_changes_nothing(name: str, begun: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Path("other.txt").write_text("".join(f"another line, number {i}\n" for i in range(30)))
    words, message = REFUSED[name]
    before = contents(begun.parent)
    assert main(["train", "--resume", "run", *words]) == 2
    error = capfd.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert contents(begun.parent) == before


def test_after_refusals_the_run_goes_on_as_if_nothing_had_been(begun: Path, finished: Path) -> None:
    for words, _ in (REFUSED["seed"], REFUSED["width"], REFUSED["optimizer"]):
        assert main(["train", "--resume", "run", *words]) == 2
    assert main(["train", "--resume", "run"]) == 0
    assert contents(begun)["model.safetensors"] == contents(finished / "run")["model.safetensors"]


def damage(begun: Path) -> None:
    file = begun / "checkpoints/step-00000004/model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")


def edit_state(begun: Path) -> None:
    file = begun / "checkpoints/step-00000004/state.json"
    file.write_text(file.read_text().replace('"step": 4', '"step": 5'))


def damage_metrics(begun: Path) -> None:
    (begun / "metrics.jsonl").write_text("{]\n")


def damage_record(begun: Path) -> None:
    (begun / "run.json").write_text("[]")


def lose_tokenizer(begun: Path) -> None:
    (begun / "tokenizer.json").unlink()


@pytest.mark.parametrize("harm", [damage, edit_state, damage_metrics, damage_record, lose_tokenizer])
def test_a_damaged_run_is_refused_as_it_is(
    harm: Callable[[Path], None], begun: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    harm(begun)
    before = contents(begun)
    assert main(["train", "--resume", "run"]) == 2
    assert capfd.readouterr().err.count("\n") == 1
    assert contents(begun) == before


def test_the_command_that_is_offered_for_a_damaged_checkpoint_works(
    begun: Path, finished: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    damage(begun)
    main(["train", "--resume", "run"])
    command = capfd.readouterr().err.strip().rpartition(": polyformer ")[2]
    assert command == "train --resume run --from-step 2"
    assert main(command.split()) == 0
    assert contents(begun)["model.safetensors"] == contents(finished / "run")["model.safetensors"]


def edit(lines: list[str]) -> list[str]:
    return [line.replace("little", "lottle") for line in lines]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (edit, "lines.txt: other content, of the same size"),
        (lambda lines: lines[1:], "lines.txt: 1,010 bytes, now 977"),
    ],
)
def test_changed_data_are_noticed(
    change: Any, message: str, begun: Path, finished: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = begun.parent / "lines.txt"
    file.write_text("".join(change(file.read_text().splitlines(keepends=True))))
    assert main(["train", "--resume", "run"]) == 2
    error = capfd.readouterr().err
    assert message in error
    command = error.strip().rpartition(": polyformer ")[2]
    assert command == "train --resume run --changed-data"
    assert main(command.split()) == 0
    assert contents(begun)["model.safetensors"] != contents(finished / "run")["model.safetensors"]
    assert main(["train", "--resume", "run", "--steps", "7"]) == 0  # these are its data now


def test_another_tokenizer_is_noticed(tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    """Also one with the same pieces and other scores, which writes the same texts in other tokens."""
    monkeypatch.chdir(tmp_path)
    Path("lines.txt").write_text(TEXT)
    recipe = tiny_recipe(Path("lines.txt"), 2, tokenizer={"algorithm": "unigram", "vocab_size": 60})
    fit(recipe, "run")
    file = Path("run/tokenizer.json")
    before, described = file.read_text(), json.loads(file.read_text())
    described["model"]["vocab"][-1][1] -= 1
    file.write_text(json.dumps(described))
    words = ["train", "--resume", "run", "--steps", "4"]
    assert main(words) == 2
    error = capfd.readouterr().err
    assert "tokenizer: tokenizer.json in run changed since the run began" in error
    assert "polyformer train --resume run --changed-data" in error
    file.write_text(before)
    assert main(words) == 0
    file.write_text(json.dumps(described))
    assert main(["train", "--resume", "run", "--steps", "6", "--changed-data"]) == 0
    assert main(["train", "--resume", "run", "--steps", "8"]) == 0  # this is its tokenizer now


def test_moved_data_are_the_same(begun: Path, finished: Path) -> None:
    (begun.parent / "elsewhere").mkdir()
    shutil.move(begun.parent / "lines.txt", begun.parent / "elsewhere/moved.txt")
    assert main(["train", "--resume", "run", "--data", "elsewhere/moved.txt"]) == 0
    assert contents(begun)["model.safetensors"] == contents(finished / "run")["model.safetensors"]


def test_fingerprints_of_every_kind_of_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.en", "a.de", "b.txt", "c.txt"):
        (tmp_path / name).write_text(name * 2000)
    for source, number in (("a.{en,de}", 2), ("*.txt", 2), ("b.txt", 1), (".", 4), ("none", 0)):
        config = DataConfig(path=str(tmp_path / source), test=str(tmp_path / "b.txt"))
        before = fingerprint(config, ("text",))
        assert len(before["path"]) == number, source
        assert data_changes(before, fingerprint(config, ("text",))) == []
    monkeypatch.setattr("polyformer.data.sources.checks.WHOLE", 100)
    monkeypatch.setattr("polyformer.data.sources.checks.BLOCK", 16)
    config = DataConfig(path=str(tmp_path / "c.txt"))
    before = fingerprint(config, ("text",))
    (tmp_path / "c.txt").write_text("c.txt" * 1000 + "d.txt" * 1000)
    assert data_changes(before, fingerprint(config, ("text",)))
    assert fingerprint(DataConfig(path="hub:one/two"), ("text",)) == {"path": []}
    assert fingerprint(DataConfig(), ("text",))["path"][0]["bytes"] > 10_000
    assert fingerprint(DataConfig(), ("image", "height", "width")) == {}


def test_an_unfinished_run_is_used_as_its_last_checkpoint_has_it(
    begun: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = Run.open("run").model("cpu")
    assert not model.training
    for name, tensor in read_tensors(begun / "checkpoints/step-00000004/model.safetensors").items():
        assert torch.equal(model.state_dict()[name], tensor)
    capfd.readouterr()
    for command in (["generate", "run", "--prompt", "the", "--max-new-tokens", "4"], ["evaluate", "run"]):
        assert main([*command, "--device", "cpu"]) == 0
        out, error = capfd.readouterr()
        assert out
        assert error == "run has not ended: this is its step 4\n"
    shutil.rmtree(begun / "checkpoints")
    assert main(["evaluate", "run"]) == 2
    assert "no checkpoint yet; resume with: polyformer train --resume run" in capfd.readouterr().err


def test_a_longer_training_is_unfinished_until_it_ends(begun: Path, finished: Path, tmp_path: Path) -> None:
    """Not the weights of its earlier end, which lie in the folder still."""
    run = Path(shutil.copytree(finished / "run", tmp_path / "longer"))
    assert Run.open(run).finished

    class StopError(Exception):
        pass

    with contextlib.suppress(StopError), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "record", lambda *words, **facts: (_ for _ in ()).throw(StopError))
        fit(tiny(finished / "lines.txt", steps=8), run, resume=True)
    assert not Run.open(run).finished
    last = read_tensors(run / "checkpoints/step-00000008/model.safetensors")
    assert all(torch.equal(last[name], tensor) for name, tensor in Run.open(run).model().state_dict().items())


def test_a_run_without_a_checkpoint_says_that_it_starts_again(
    begun: Path, finished: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(begun / "checkpoints")
    assert main(["train", "--resume", "run"]) == 0
    assert "run has no checkpoint yet: it starts again at step 0\n" in capfd.readouterr().out
    assert contents(begun)["model.safetensors"] == contents(finished / "run")["model.safetensors"]


def test_a_resume_before_the_first_checkpoint_begins_with_the_same_weights(
    begun: Path, finished: Path, tmp_path: Path
) -> None:
    """Those of the checkpoint or the run it started from, not fresh ones."""
    recipe = Recipe.from_dict(
        {**tiny(finished / "lines.txt").to_dict(), "model": {"pretrained": str(finished / "run")}}
    )
    for name, how in (("pretrained", {}), ("start", {"start": finished / "run"})):
        out = tmp_path / name
        fit(recipe if name == "pretrained" else tiny(finished / "lines.txt"), out, **how)
        whole = contents(out)["model.safetensors"]
        shutil.rmtree(out / "checkpoints")
        (out / "model.safetensors").unlink()
        fit(Run.open(out).recipe, out, resume=True)
        assert contents(out)["model.safetensors"] == whole


def test_a_new_run_that_is_refused_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        fit(tiny(tmp_path / "nothing.txt"), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_options_of_a_resume_need_one(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--from-step", "3"]) == 2
    assert main(["train", "--changed-data"]) == 2
    first, second = capfd.readouterr().err.splitlines()
    assert "--from-step: requires --resume RUN" in first
    assert "--changed-data: requires --resume RUN" in second


def test_nothing_learns_from_an_unfinished_run(begun: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = contents(begun.parent)
    assert main(["distill", "run", "--out", "student"]) == 2
    error = capfd.readouterr().err
    assert error == (
        f"polyformer: error: {begun}: this run has not ended, so nothing can learn from it yet; "
        f"resume with: polyformer train --resume {begun}\n"
    )
    assert contents(begun.parent) == before


def test_the_way_out_of_another_model_works(finished: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = str(finished / "run")
    assert main(["train", "--resume", run, "--seed", "9"]) == 2
    error = capfd.readouterr().err.strip()
    assert error.endswith(f"train RECIPE --pretrained {run} (with the weights of this one) --out NEW")


def test_the_first_difference_is_named_by_its_place() -> None:
    assert first_difference({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}) == ("a.c", 2, 3)
    assert first_difference({"a": {}}, {"a": {"b": 1}}) == ("a.b", None, 1)
    assert first_difference({"a": 1}, {"a": 1}) is None
