"""Every command, from words to what it prints."""

import importlib.metadata
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from transformers import GPT2Config, GPT2LMHeadModel

import polyformer
from polyformer.cli import commands
from polyformer.cli.commands import COMMANDS, load_command
from polyformer.cli.main import main
from polyformer.models.architectures import Transformer
from polyformer.models.outputs import ModelOutput

Trained = Callable[[str], Path]
HEAVY = {
    *("torch", "datasets", "tokenizers", "accelerate", "transformers", "matplotlib", "numpy", "yaml"),
    *("importlib.metadata", "email", "argparse", "dataclasses", "inspect", "json", "logging", "pathlib"),
}
"""What neither an import of polyformer nor its list of commands needs."""


def output(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(words) == 0
    return capsys.readouterr().out


def test_help_lists_the_commands_with_the_first_line_of_their_help(capsys: pytest.CaptureFixture[str]):
    shown = dict(line.split(None, 1) for line in output(capsys, "--help").splitlines()[5:-2])
    assert shown == {name: load_command(name).help.splitlines()[0] for name in COMMANDS}


@pytest.mark.parametrize(
    ("code", "own"),
    [
        ("import polyformer", {"core", "core.imports"}),
        (
            "from polyformer.cli.main import main; main(['--help'])",
            {"cli", "cli.commands", "cli.main", "core", "core.errors", "core.imports"},
        ),
    ],
)
def test_imports_and_help_load_almost_nothing(code: str, own: set[str]):
    """Counted, as times depend on the machine; what Python itself loads at its start is not counted."""
    code = f"import sys; before = {{*sys.modules}}; {code}; print(*{{*sys.modules}} - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert {name for name in loaded if name.startswith("polyformer.")} == {
        f"polyformer.{name}" for name in own
    }
    assert not loaded & HEAVY


def test_commands_of_the_laboratory_say_how_to_install_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, complaint: Callable[..., str]
):
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda **_: ()
    )  # as where the laboratory is absent
    monkeypatch.setattr(commands, "find_spec", lambda _: None)
    for name in commands.LABORATORY:
        assert "pip install 'polyformer[lab]'" in complaint(name, "warmup")
    assert "  reproduce   Requires polyformer-lab." in output(capsys, "--help")


def test_every_command_has_help_with_examples(capsys: pytest.CaptureFixture[str]):
    texts = {name: output(capsys, name, "--help") for name in COMMANDS}
    assert not [name for name, text in texts.items() if not text.startswith(f"usage: polyformer {name}")]
    assert not [name for name, text in texts.items() if f"\n  polyformer {name}" not in text]


def test_version(capsys: pytest.CaptureFixture[str]):
    assert output(capsys, "--version") == f"polyformer {polyformer.__version__}\n"


def test_a_recipe_is_printed_whole_with_its_changes(capsys: pytest.CaptureFixture[str]):
    text = output(
        capsys, "train", "multi30k", "--print", "--steps", "7", "--schedule.kind", "linear", "--plot"
    )
    recipe = yaml.safe_load(text)
    assert recipe["training"]["steps"] == 7
    assert recipe["training"]["reporting"]["curves"] is True
    assert recipe["schedule"] == {"kind": "linear", "warmup": 0, "floor": 0.0}
    assert recipe["data"]["path"] == "train.{en,de}.gz"


def test_a_printed_recipe_trains(tmp_path: Path, train_tiny: Trained, capsys: pytest.CaptureFixture[str]):
    folder = train_tiny("lm")
    path = tmp_path / "mine.yaml"
    path.write_text((folder / "recipe.yaml").read_text())
    out = output(capsys, "train", str(path), "--out", str(tmp_path / "run"))
    assert f"Saved in {tmp_path / 'run'}" in out
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == (
        folder / "model.safetensors"
    ).read_bytes()


def test_training_ends_with_baselines_a_sample_and_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("a few words and a few more words\n" * 40)
    words = ["--data", "text.txt", "--steps", "1", "--tokenizer.algorithm", "bytes", "--task.prompt", "a few"]
    out = output(capsys, "train", *words)
    for title in ("uniform ", "5-gram (Kneser-Ney) ", "this model, validation "):
        assert f"\n{title}" in out
    assert "\nA sample:\na few" in out
    assert out.endswith("Saved in runs/default-1\n")
    record = json.loads((tmp_path / "runs/default-1/run.json").read_text())
    assert record["baselines"]["uniform"]["perplexity"] == pytest.approx(260)
    recipe = yaml.safe_load((tmp_path / "runs/default-1/recipe.yaml").read_text())
    assert recipe["data"]["path"] == str(tmp_path / "text.txt")
    assert output(capsys, "train", *words).endswith("Saved in runs/default-2\n")


def test_a_run_goes_on_with_resume(train_tiny: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    import shutil

    folder = tmp_path / "more"
    shutil.copytree(train_tiny("lm"), folder)
    out = output(capsys, "train", "--resume", str(folder), "--steps", "3")
    assert "step 3/3" in out
    assert json.loads((folder / "run.json").read_text())["steps"] == 3


@pytest.mark.parametrize("task", ["lm", "mlm", "translate", "classify", "tag"])
def test_evaluate_repeats_what_training_measured(
    task: str, train_tiny: Trained, capsys: pytest.CaptureFixture[str]
):
    folder = train_tiny(task)
    lines = output(capsys, "evaluate", str(folder), "--device", "cpu").strip().split("\n")
    record = json.loads((folder / "run.json").read_text())["metrics"]["validation"]
    assert lines[1].split()[0] == "validation"
    assert len(lines[1].split()) == 1 + len(record)
    assert float(lines[1].split()[1].replace(",", "")) == pytest.approx(record["loss"], rel=1e-3)


def test_evaluate_on_other_data(train_tiny: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "more.csv").write_text("text,label\nfine film,pos\n")
    out = output(capsys, "evaluate", str(train_tiny("classify")), "--data", str(tmp_path / "more.csv"))
    assert "more.csv" in out


def test_evaluate_with_nothing_to_measure_on(
    train_tiny: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    import shutil

    shutil.copytree(train_tiny("lm"), tmp_path / "copy")
    path = tmp_path / "copy" / "recipe.yaml"
    path.write_text(path.read_text().replace("validation_fraction: 0.05", "validation_fraction: 0"))
    assert main(["evaluate", str(tmp_path / "copy")]) == 2
    assert "its recipe has no validation or test data; name them with --data" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("lm", ("generate", "RUN", "--prompt", "line", "--max-new-tokens", "2")),
        ("lm", ("evaluate", "RUN")),
        ("translate", ("translate", "RUN", "word 3")),
        ("classify", ("classify", "RUN", "good film")),
        ("tag", ("tag", "RUN", "Anna sleeps")),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_tiny_model_is_used_by_one_thread(
    task: str, words: tuple[str, ...], train_tiny: Trained, monkeypatch: pytest.MonkeyPatch
):
    folder, seen = str(train_tiny(task)), set()
    forward = Transformer.forward

    def watched(self: Transformer, *arguments: object, **options: object) -> ModelOutput:
        seen.add(torch.get_num_threads())
        return forward(self, *arguments, **options)

    monkeypatch.setattr(Transformer, "forward", watched)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert main([folder if word == "RUN" else word for word in words]) == 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert seen == {1}


def test_generate_streams_a_continuation(train_tiny: Trained, capsys: pytest.CaptureFixture[str]):
    folder = str(train_tiny("lm"))
    greedy = output(capsys, "generate", folder, "--prompt", "line", "--max-new-tokens", "4")
    assert greedy.startswith("line")
    words = ["--prompt", "line", "--temperature", "2.0", "--seed", "1", "--max-new-tokens", "8"]
    assert output(capsys, "generate", folder, *words) == output(capsys, "generate", folder, *words)
    beams = output(
        capsys, "generate", folder, "--prompt", "line", "--num-beams", "2", "--max-new-tokens", "4"
    )
    assert beams.startswith("line")


def test_translate_a_text_and_lines(
    train_tiny: Trained, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    folder = str(train_tiny("translate"))
    alone = output(capsys, "translate", folder, "word 3", "--num-beams", "1")
    monkeypatch.setattr(sys, "stdin", io.StringIO("word 3\nword 4\n"))
    both = output(capsys, "translate", folder, "--num-beams", "1")
    assert both.count("\n") >= 2
    assert both.startswith(alone)


def test_classify(train_tiny: Trained, capsys: pytest.CaptureFixture[str]):
    label, share = output(capsys, "classify", str(train_tiny("classify")), "good film").split()
    assert label in ("pos", "neg")
    assert 0.5 <= float(share) <= 1


def test_tag_splits_words_and_marks(train_tiny: Trained, capsys: pytest.CaptureFixture[str]):
    out = output(capsys, "tag", str(train_tiny("tag")), "Anna's in New-York, @home.")
    words = [line.split("\t")[0] for line in out.strip().split("\n")]
    assert words == ["Anna's", "in", "New-York", ",", "@home", "."]
    assert {line.split("\t")[1] for line in out.strip().split("\n")} <= {"O", "B-PER", "B-LOC", "I-LOC"}


def test_list_by_name_and_by_axis(capsys: pytest.CaptureFixture[str]):
    out = output(capsys, "list", "decoder-*")
    assert [line.split()[1] for line in out.strip().split("\n")] == ["decoder-small", "decoder-tiny"]
    assert "Vaswani" in output(capsys, "list", "sinusoidal")
    everything = output(capsys, "list")
    assert all(
        f" {name} " in everything
        for name in ("multi30k", "gpt2", "softmax", "Window", "adamw", "noam", "tag")
    )
    assert {line.split()[0] for line in output(capsys, "list", "position").strip().split("\n")} == {
        "Position"
    }


def test_show_a_preset_and_a_run(train_tiny: Trained, capsys: pytest.CaptureFixture[str]):
    assert "decoder-small: 5,338,624 parameters" in output(capsys, "show", "decoder-small")
    out = output(capsys, "show", str(train_tiny("lm")))
    assert "decoder Stack" in out


def test_show_a_checkpoint_of_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=40, n_positions=64)
    GPT2Config.save_pretrained(config, tmp_path / "gpt")  # the weights are not read
    parameters = GPT2LMHeadModel(config).num_parameters()
    assert f"gpt: {parameters:,} parameters" in output(capsys, "show", str(tmp_path / "gpt"))
    assert main(["show", str(tmp_path / "gpt"), "--model.block", "pre"]) == 2
    assert "only presets have settings" in capsys.readouterr().err


def test_bench_takes_settings_by_name(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    from polyformer_lab.bench import passes

    seen = []
    monkeypatch.setattr(passes, "run_training", lambda config: seen.append(config))
    passes.run_training.__annotations__ = {"config": passes.TrainingBench}
    assert main(["bench", "training", "--layers", "2", "--dtype", "bfloat16"]) == 0
    assert (seen[0].layers, seen[0].dtype) == (2, "bfloat16")
