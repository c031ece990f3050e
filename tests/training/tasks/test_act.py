"""Acting as recorded: windows, returns, what is learnt and kept, and what is refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import polyformer
from polyformer import InputError
from polyformer.cli.main import main
from polyformer.core.files import read_tensors
from polyformer.data.episodes import Episodes, EpisodeWindows
from polyformer.models.architectures import TrajectoryTransformer
from polyformer.training.recipes import ModelChoice, Recipe, Run, fit
from polyformer.training.tasks import ActionPredictionConfig

Row = dict[str, Any]


def episode(generator: np.random.Generator, steps: int, discrete: bool) -> Row:
    """Good ones act as the observation says, bad ones the other way: only the return tells which."""
    sign = generator.choice([-1.0, 1.0])
    seen = generator.normal(3.0, 2.0, (steps, 3))
    wanted = sign * (seen[:, :1] - 3.0)
    actions = (wanted[:, 0] > 0).astype(int) if discrete else np.tanh(wanted)
    return {"observations": seen.tolist(), "actions": actions.tolist(), "rewards": [sign / steps] * steps}


def rows(number: int = 40, discrete: bool = False) -> list[Row]:
    generator = np.random.default_rng(0)
    return [episode(generator, int(generator.integers(3, 12)), discrete) for _ in range(number)]


def write(path: Path, episodes: list[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in episodes))
    return path


def tiny(path: Path, steps: int = 6, **data: Any) -> Recipe:
    return Recipe.from_dict(
        {
            "task": {"kind": "act", "context": 5, "batch_tokens": 240},
            "model": {"preset": "dt-tiny", "dropout": 0.1},
            "data": {"path": str(path), "validation_fraction": 0.2, **data},
            "optimizer": {"kind": "adamw", "lr": 5e-3},
            "schedule": "constant",
            "training": {"steps": steps, "engine": {"device": "cpu"}, "saving": {"checkpoint_every": 3}},
            "seed": 3,
        }
    )


def test_returns_are_what_is_still_to_come():
    row = {"observations": [1, 2, 3], "actions": [0, 1, 0], "rewards": [1.0, 10.0, 100.0]}
    episodes = Episodes.of([row, row])
    assert episodes.returns.tolist() == [111, 110, 100] * 2
    assert episodes.starts.tolist() == [0, 3, 6]
    assert episodes.discrete
    assert not Episodes.of([{**row, "actions": [0.0, 1.0, 0.0]}]).discrete


def test_windows_stay_in_their_episode_and_are_padded_on_the_left():
    episodes = Episodes.of(rows(6))
    windows = EpisodeWindows(episodes, context=4, batch_size=7, seed=1)
    firsts, steps = [], 0
    for _, batch in windows.epoch(0):
        for row, real in enumerate(batch["attention_mask"].bool()):
            kept = int(real.sum())
            assert real.tolist() == [False] * (4 - kept) + [True] * kept
            place = int(
                np.flatnonzero((episodes.observations == batch["states"][row, -kept].numpy()).all(1))[0]
            )
            firsts.append(place)
            last = int(episodes.starts[episodes.starts > place][0])
            assert kept == min(4, last - place)
            window = slice(place, place + kept)
            assert batch["states"][row, -kept:].numpy().tolist() == episodes.observations[window].tolist()
            assert batch["labels"][row, -kept:].numpy().tolist() == episodes.actions[window].tolist()
            assert (
                batch["returns_to_go"][row, -kept:, 0].numpy().tolist() == episodes.returns[window].tolist()
            )
            times = place - int(episodes.starts[episodes.starts <= place][-1]) + np.arange(kept)
            assert batch["timesteps"][row, -kept:].tolist() == times.tolist()
            assert not batch["states"][row, :-kept].any()
            steps += 1
    assert sorted(firsts) == list(range(len(episodes.returns)))
    assert firsts != sorted(firsts)
    held = EpisodeWindows(episodes, context=4, batch_size=7, shuffle=False)
    assert sum(int(batch["attention_mask"].sum()) for _, batch in held.epoch(0)) == len(episodes.returns)


def test_an_epoch_goes_on_from_a_position():
    windows = EpisodeWindows(Episodes.of(rows(6)), context=4, batch_size=7, seed=1)
    whole = list(windows.epoch(2))
    rest = list(windows.epoch(2, position=whole[2][0]))
    assert len(rest) == len(whole) - 3
    assert all(
        torch.equal(batch["states"], other["states"]) for (_, batch), (_, other) in zip(rest, whole[3:])
    )
    assert not torch.equal(next(windows.epoch(3))[1]["states"], whole[0][1]["states"])


@pytest.mark.parametrize("discrete", [False, True])
def test_actions_follow_the_return_that_is_asked_for(discrete: bool, tmp_path: Path):
    recipe = tiny(write(tmp_path / "a.jsonl", rows(150, discrete)), steps=100)
    recipe = dataclasses.replace(recipe, model=ModelChoice(preset="dt-tiny", options={"dropout": 0.0}))
    fitted = fit(recipe, tmp_path / "run")
    score = fitted.scores["validation"]
    assert score["loss"] < 0.7 * score["baseline_loss"]
    if discrete:
        assert score["accuracy"] > 0.75 > score["baseline_accuracy"]
        # what the return says is what is done: asked for the opposite, it acts otherwise
        batch = next(fitted.task.rows.held_out(fitted.splits.validation).batches.epoch(0))[1]
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        asked = {**inputs, "returns_to_go": -inputs["returns_to_go"]}
        with torch.no_grad():
            before, after = (fitted.model(**arguments).actions.argmax(-1) for arguments in (inputs, asked))
        real = batch["attention_mask"].bool()
        assert (before != after)[real].float().mean() > 0.5


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("acting")
    fit(tiny(write(root / "a.jsonl", rows())), root / "run")
    return root / "run"


def test_a_run_keeps_all_that_acting_needs(run: Path):
    kept = Run.open(run).recipe.task
    assert isinstance(kept, ActionPredictionConfig)
    assert kept.state_mean == pytest.approx((3.0, 3.0, 3.0), abs=1.0)
    assert kept.return_scale == pytest.approx(1.0, abs=1e-6)
    assert (kept.discrete, kept.bounded, len(kept.usual_action or ())) == (False, True, 1)
    assert not (run / "tokenizer.json").exists()
    model: Any = polyformer.from_pretrained(run)
    assert isinstance(model, TrajectoryTransformer)
    assert (model.config.head.state_size, model.config.head.action_size) == (3, 1)


def test_a_run_of_actions_resumes_bit_by_bit(run: Path, tmp_path: Path):
    recipe = Run.open(run).recipe
    fit(recipe, tmp_path / "part")
    for late in (tmp_path / "part" / "checkpoints").glob("*6"):
        for file in late.iterdir():
            file.unlink()
        late.rmdir()
    (tmp_path / "part" / "model.safetensors").unlink()
    fit(recipe, tmp_path / "part", resume=True)
    before, after = (read_tensors(folder / "model.safetensors") for folder in (run, tmp_path / "part"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_model_of_actions_is_trained_and_evaluated_by_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture
):
    data = write(tmp_path / "a.jsonl", rows())
    small = ["--model", "dt-tiny", "--steps", "2", "--device", "cpu"]
    assert main(["train", "dt", "--data", str(data), *small, "--out", str(tmp_path / "r")]) == 0
    assert "baseline loss" in capsys.readouterr().out
    assert main(["evaluate", str(tmp_path / "r"), "--device", "cpu"]) == 0
    assert "baseline loss" in capsys.readouterr().out
    assert main(["evaluate", str(tmp_path / "r"), "--data", str(data), "--device", "cpu"]) == 0


def test_arrays_of_a_npz_file_are_the_same_episodes(tmp_path: Path):
    episodes = rows(5)
    ends = np.concatenate([[*[False] * (len(row["rewards"]) - 1), True] for row in episodes])
    arrays = {
        name: np.concatenate([row[name] for row in episodes])
        for name in ("observations", "actions", "rewards")
    }
    np.savez(tmp_path / "a.npz", **arrays, terminals=ends, name=np.array("walker"))
    ends[-1] = False  # the rest is an episode too
    np.savez(tmp_path / "b.npz", **arrays, timeouts=ends)
    from polyformer.data import DataConfig, read

    lines = write(tmp_path / "a.jsonl", episodes)
    results = [
        list(read(DataConfig(), ("observations", "actions", "rewards"), str(path)))
        for path in (lines, tmp_path / "a.npz", tmp_path / "b.npz")
    ]
    assert results[0] == results[1] == results[2] == episodes


GOOD: Row = {"observations": [[1, 2], [3, 4]], "actions": [[0.5], [1]], "rewards": [1, 2]}
BAD: dict[str, tuple[Row, str]] = {
    "no rewards": ({"observations": [[1, 2]], "actions": [[1]]}, "row 3: no column 'rewards'; it has 'obs"),
    "lengths": (
        {**GOOD, "rewards": [1]},
        "row 3: expected as many of each, one a step, got 2 observations, 2 ac",
    ),
    "ragged": (
        {**GOOD, "observations": [[1, 2], [3]]},
        "row 3: 'observations': its steps are of several widths",
    ),
    "width": (
        {**GOOD, "observations": [[1], [3]]},
        "row 3: 'observations': expected 2 numbers a step, as in the",
    ),
    "nan": (
        {**GOOD, "observations": [[1, 2], [3, float("nan")]]},
        r"not a finite number \(NaN, or too l.* step 1",
    ),
    "large": (
        {**GOOD, "rewards": [1, 1e300]},
        r"'rewards': not a finite number \(NaN, or too large\) at step 1",
    ),
    "null": ({**GOOD, "rewards": [1, None]}, "'rewards': expected a number, or a list of numbers, for each"),
    "text": (
        {**GOOD, "actions": ["left", "right"]},
        "'actions': expected a number, or a list of numbers, for",
    ),
    "rewards of two": (
        {**GOOD, "rewards": [[1, 2], [3, 4]]},
        "'rewards': expected one number for each step, got 2",
    ),
    "empty": ({"observations": [], "actions": [], "rewards": []}, "expected a number, or a list of numbers"),
}


@pytest.mark.parametrize("name", BAD)
def test_an_episode_with_missing_or_odd_columns_is_refused(name: str, tmp_path: Path):
    row, message = BAD[name]
    path = write(tmp_path / "a.jsonl", [GOOD, GOOD, row, GOOD])
    with pytest.raises(InputError, match=message):
        fit(tiny(path), tmp_path / "run")
    assert not (tmp_path / "run" / "recipe.yaml").exists()


def test_an_episode_longer_than_the_table_is_refused(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", [episode(np.random.default_rng(0), 129, False)] * 4)
    with pytest.raises(
        InputError, match=r"max_timesteps: an episode has 129 steps, and the model's table 128"
    ):
        fit(tiny(path), tmp_path / "run")
    assert not (tmp_path / "run" / "recipe.yaml").exists()


def test_held_out_episodes_of_another_kind_are_refused(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", rows(discrete=True))
    others = {
        "choices from 0 to 1, as the training episodes have, got 7 to 7": {"actions": [7, 7]},
        "actions: expected them as the training": {"actions": [[0.5], [0.5]]},
        "observations: expected 3 numbers a step, as the training episodes have, got 2": {
            "observations": [[1, 2]] * 2
        },
    }
    good = {"observations": [[1, 2, 3]] * 2, "actions": [0, 1], "rewards": [1, 1]}
    for message, change in others.items():
        held = write(tmp_path / "held.jsonl", [{**good, **change}])
        with pytest.raises(InputError, match=message):
            fit(tiny(path, validation=str(held)), tmp_path / "run")


def test_other_models_and_other_tasks_are_refused(tmp_path: Path):
    path = str(write(tmp_path / "a.jsonl", rows(4)))
    text = tmp_path / "a.txt"
    text.write_text("a b c\n" * 40)
    for recipe, message in [
        ({**tiny(Path(path)).to_dict(), "model": "decoder-tiny"}, "needs a model of trajectories, such as"),
        (
            {"model": "dt-tiny", "data": {"path": str(text)}},
            "needs decoder stacks, got a model that reads no text",
        ),
    ]:
        with pytest.raises(InputError, match=message):
            fit(Recipe.from_dict(recipe), tmp_path / "run")
    with pytest.raises(InputError, match="streaming: episodes are held in memory"):
        fit(tiny(Path(path), streaming=True), tmp_path / "run")
    np.savez(tmp_path / "a.npz", observations=np.zeros((3, 2)))
    (tmp_path / "b.npz").write_bytes(b"PK\x03\x04 no more")
    np.savez(tmp_path / "c.npz", observations=np.array([{}, {}], object), terminals=[0, 1])
    for name, message in [
        ("a.npz", "expected an array 'terminals'"),
        ("b.npz", "not a .npz file"),
        ("c.npz", "not a .npz"),
    ]:
        with pytest.raises(InputError, match=message):
            fit(tiny(tmp_path / name), tmp_path / "run")
