"""Staged training: what each stage changes, and that it goes on with the weights of the one before."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import polyformer
from polyformer import InputError
from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.patterns import Global, Pattern, PerHead, PerLayer, Window
from polyformer.cli.main import main
from polyformer.models.config import ModelConfig
from polyformer.training.recipes import Recipe, fit, fit_stages, stages
from polyformer.training.recipes.fit import widen_windows


def recipe(path: Path, **changes: Any) -> Recipe:
    """A language model of bytes that trains in a moment."""
    return Recipe.from_dict(
        {
            "task": {"kind": "lm", "row_length": 16, "batch_tokens": 32, "overlap": 4},
            "model": {
                "preset": "longformer-decoder-small",
                "hidden_size": 16,
                "num_attention_heads": 2,
                "num_hidden_layers": 2,
                "intermediate_size": 16,
            },
            "data": {"path": str(path), "format": "lines", "validation_fraction": 0.25},
            "tokenizer": {"algorithm": "bytes"},
            "optimizer": {"kind": "adamw", "lr": 0.008},
            "training": {"steps": 2, "engine": {"device": "cpu"}},
            **changes,
        }
    )


def pattern(config: ModelConfig) -> Pattern | None:
    assert config.decoder is not None
    mechanism = config.decoder.attention.mechanism
    assert isinstance(mechanism, SoftmaxConfig)
    return mechanism.pattern


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (Window(255, 0), Window(1023, 0)),
        (Window(8), Window(32)),
        (Window(0, 3, dilation=2), Window(0, 12, dilation=2)),
        (
            PerLayer((Window(2) | Global(3), PerHead((Window(1, 0, 3),)))),
            PerLayer((Window(8) | Global(3), PerHead((Window(7, 0, 3),)))),
        ),
    ],
    ids=str,
)
def test_windows_are_widened_wherever_they_stand(pattern: Pattern, expected: Pattern):
    assert widen_windows(pattern, 4) == expected
    assert widen_windows(pattern, 1) == pattern


def test_each_stage_doubles_and_halves(tmp_path: Path):
    first, second, third = stages(recipe(tmp_path), 3)
    assert first == recipe(tmp_path)
    lengths = [stage.task.to_dict()["row_length"] for stage in (first, second, third)]
    assert lengths == [16, 32, 64]
    assert [stage.task.batch_tokens for stage in (first, second, third)] == [32, 32, 64]
    assert [stage.optimizer.lr for stage in (first, second, third)] == [0.008, 0.004, 0.002]
    reaches = [widest(pattern(stage.model.config())) for stage in (first, second, third)]
    assert reaches == [(31, 63, 127, 127), (63, 127, 255, 255), (127, 255, 511, 511)]
    same = dataclasses.replace(third, model=first.model, task=first.task, optimizer=first.optimizer)
    assert same == first
    assert Recipe.from_yaml(third.to_yaml()) == third


def widest(pattern: Pattern | None) -> tuple[int, ...]:
    assert isinstance(pattern, PerLayer)
    windows = [
        windowed.patterns[0] if isinstance(windowed, PerHead) else windowed for windowed in pattern.patterns
    ]
    return tuple(window.before for window in windows if isinstance(window, Window))


def test_a_stage_goes_on_with_the_weights_of_the_one_before(tmp_path: Path):
    text = tmp_path / "lines.txt"
    text.write_text("".join(f"the line of number {i} says little\n" for i in range(30)))
    still = recipe(text, optimizer={"kind": "adamw", "lr": 1e-12, "weight_decay": 0.0})
    first, second = fit_stages(still, tmp_path / "run", 2)
    for name, tensor in first.model.state_dict().items():
        torch.testing.assert_close(second.model.state_dict()[name], tensor, rtol=0, atol=1e-8)
    assert second.run.tokenizer.backend.to_str() == first.run.tokenizer.backend.to_str()
    assert second.run.folder == tmp_path / "run" / "stage-2"
    model = polyformer.from_pretrained(second.run.folder)
    assert pattern(model.config) == widen_windows(pattern(first.model.config), 2)


def test_weights_of_another_shape_are_refused(tmp_path: Path):
    text = tmp_path / "lines.txt"
    text.write_text("a few words\n" * 40)
    first = fit(recipe(text), tmp_path / "first")
    wider = recipe(text, model={**recipe(text).model.to_dict(), "intermediate_size": 24})
    with pytest.raises(
        InputError, match=r"has no decoder\.layers\.0\.feedforward.* only tables of positions may"
    ):
        fit(wider, tmp_path / "second", start=first.run.folder)
    assert not (tmp_path / "second" / "recipe.yaml").exists()


def test_stages_of_other_tasks_are_refused(tmp_path: Path):
    with pytest.raises(InputError, match="number: expected 1 stage or more, got 0"):
        stages(recipe(tmp_path), 0)
    other = recipe(tmp_path, task={"kind": "classify"}, model="encoder-tiny")
    with pytest.raises(InputError, match="stages: expected the task 'lm' or 'mlm', got 'classify'"):
        stages(other, 2)


def test_stages_by_command_go_on_where_they_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "text.txt").write_text("a few words\n" * 40)
    path, out = tmp_path / "mine.yaml", tmp_path / "long"
    path.write_text(recipe(tmp_path / "text.txt").to_yaml())
    words = ["train", str(path), "--out", str(out)]
    assert main([*words, "--stages", "2"]) == 0
    assert f"Saved in {out / 'stage-2'}" in capsys.readouterr().out
    first = (out / "stage-1" / "model.safetensors").stat().st_mtime_ns
    shutil.rmtree(out / "stage-2")
    assert main([*words, "--stages", "2"]) == 0
    assert (out / "stage-1" / "model.safetensors").stat().st_mtime_ns == first
    assert (out / "stage-2" / "model.safetensors").is_file()
    assert main([*words, "--stages", "3", "--optimizer.lr", "0.1"]) == 2
    assert "stage-1: a stage of another recipe; choose another --out" in capsys.readouterr().err
    assert main(["train", "--resume", str(out / "stage-2"), "--stages", "2"]) == 2
    assert "--stages: to resume stages, repeat the same command" in capsys.readouterr().err


def test_a_later_stage_is_resumed_without_the_one_before(tmp_path: Path):
    (tmp_path / "text.txt").write_text("a few words\n" * 40)
    first, second = fit_stages(recipe(tmp_path / "text.txt"), tmp_path / "run", 2)
    expected = second.model.state_dict()
    shutil.rmtree(first.run.folder)
    longer = dataclasses.replace(
        second.run.recipe, training=dataclasses.replace(second.run.recipe.training, steps=3)
    )
    resumed = fit(longer, second.run.folder, resume=True)
    assert resumed.result.step == 3
    assert resumed.model.config == second.model.config
    assert any(not torch.equal(expected[name], tensor) for name, tensor in resumed.model.state_dict().items())
