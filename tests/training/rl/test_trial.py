"""Trying a model in environments side by side, its returns as lines and pictures, and the command line."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from polyformer import InputError
from polyformer.cli.main import main
from polyformer.data import DataConfig, read
from polyformer.data.episodes import ROLES, Episodes
from polyformer.models.architectures import TrajectoryTransformer
from polyformer.models.presets import model_config
from polyformer.training.recipes import Recipe, Run, fit
from polyformer.training.rl.playing import Panel, Trial, achieved_returns, draw_returns, returns_table
from polyformer.training.tasks.act import ActionPrediction, ActionPredictionConfig, best

CART, PENDULUM = "minari:cart/mixed-v0", "minari:pendulum/short-v0"


def untrained(source: str, **options: Any) -> tuple[TrajectoryTransformer, ActionPrediction]:
    """A model with weights large enough for its actions to differ, and its task."""
    rows = list(read(DataConfig(), ROLES, source))
    task = ActionPredictionConfig(**options).with_source_defaults(source).resolve(rows).build()
    torch.manual_seed(4)
    model = TrajectoryTransformer(task.adapt(model_config("dt-tiny", {"initializer_range": 1.0})))
    return model.eval(), task


def trial(task: ActionPrediction, **changes: Any) -> Trial:
    config = task.config
    assert config.environment is not None
    settings = {"returns": (20.0, 5.0), "episodes": 3, **changes}
    return Trial(environment=config.environment, options=config.environment_options or {}, **settings)


@pytest.mark.parametrize(("source", "steps"), [(PENDULUM, 12), (CART, 30)])
def test_episodes_side_by_side_are_those_of_a_loop(source: str, steps: int, minari_here: Path):
    """By the definition: an episode at a time, the whole model over all its steps so far. Of choices, some
    episodes end before the others."""
    model, task = untrained(source, context=30)
    name, size, asked = task.config.environment or "", len(task.metrics.usual), (-10.0, 90.0)
    with torch.no_grad():
        model.head.actions.weight *= 1e4 if task.config.discrete else 1.0  # so that nothing is left to chance
    results = achieved_returns(model, task, trial(task, returns=asked, episodes=4, seed=3, max_steps=steps))
    environment: Any = gymnasium.make(name)
    for wanted in asked:
        for number, result in enumerate(results[wanted]):
            seen, _ = environment.reset(seed=3 * 4 + number)
            states, returns, actions, ended = [], [wanted], [], False
            while not ended and len(states) < steps:
                states.append(task.rows.scaled_states(np.array(seen)))
                inputs = {
                    "states": np.array([states]),
                    "actions": np.array([[*actions, np.zeros(size)]]),
                    "returns_to_go": task.rows.scaled_returns(np.array([returns]))[..., None],
                }
                tensors = {name: torch.from_numpy(x.astype(np.float32)) for name, x in inputs.items()}
                with torch.no_grad():
                    scores = model(**tensors, timesteps=torch.arange(len(states))[None]).actions[0, -1]
                choice = int(scores.argmax())
                action = choice if task.config.discrete else scores.clamp(-2, 2).numpy()
                actions.append(np.eye(size)[choice] if task.config.discrete else action)
                seen, reward, ended, *_ = environment.step(action)
                returns.append(returns[-1] - float(reward))
            assert result == pytest.approx(wanted - returns[-1], rel=1e-4)
    assert len({value for returns in results.values() for value in returns}) > 3, "some end before others"


def test_choices_are_drawn_and_episodes_end_alone(minari_here: Path):
    model, task = untrained(CART)
    results = achieved_returns(model, task, trial(task, episodes=6))
    assert achieved_returns(model, task, trial(task, episodes=6)) == results
    assert achieved_returns(model, task, trial(task, episodes=6, seed=1)) != results
    assert list(results) == [20.0, 5.0]
    assert len({*results[20.0], *results[5.0]}) > 2
    assert all(5 <= value <= 30 for values in results.values() for value in values)
    cut = achieved_returns(model, task, trial(task, max_steps=6))
    assert max(value for values in cut.values() for value in values) == 6
    sure, _ = untrained(CART)
    with torch.no_grad():
        for parameter in sure.head.actions.parameters():
            parameter.zero_()
        assert sure.head.actions.bias is not None
        sure.head.actions.bias[1] = 50.0  # always to the right: it falls within twelve steps
    assert max(achieved_returns(sure, task, trial(task))[20.0]) < 13


def test_cloning_reads_no_returns(minari_here: Path):
    model, task = untrained(PENDULUM, conditioned=False)
    results = achieved_returns(model, task, trial(task, returns=(-100.0, 0.0)))
    assert results[-100.0] == pytest.approx(results[0.0], rel=1e-4)
    rows = list(read(DataConfig(), ROLES, PENDULUM))
    batch = next(task.rows.held_out(rows).batches.epoch(0))[1]
    assert not batch["returns_to_go"].any()
    assert batch["states"].any()
    kept = best(rows, 0.25)
    assert len(kept) == 3
    floor = min(sum(row["rewards"]) for row in kept)
    assert sum(sum(row["rewards"]) >= floor for row in rows) == 3
    assert best(rows, 1.0) == rows
    assert len(best(rows, 0.001)) == 1
    few = ActionPredictionConfig(best_episodes=0.25).resolve(rows).build()
    windows = few.rows.training_batches(rows, 0)
    assert windows.episodes.starts.tolist() == Episodes.of(kept).starts.tolist()
    with pytest.raises(InputError, match=r"best_episodes: expected a share in \(0, 1\], got 0"):
        ActionPredictionConfig(best_episodes=0)


def test_environments_of_other_spaces_are_refused(minari_here: Path):
    model, task = untrained(CART)
    config = task.config
    for environment, options, message in [
        (
            "Acrobot-v1",
            {},
            r"it has observations of 6 numbers and 3 choices, and the model was trained on observations of 4 "
            "numbers and 2 choices; name the one where its episodes were recorded",
        ),
        (
            "MountainCarContinuous-v0",
            {},
            "observations of 2 numbers and 1 numbers in an action, and the model",
        ),
        (
            "CartPole-v1",
            {},
            "up to 500 steps, and the model's table 128; train with --model.max_timesteps 500",
        ),
        ("Blackjack-v1", {}, "it has observations of 45 numbers and 2 choices"),
        ("CartPole-v9", {}, "gymnasium cannot make 'CartPole-v9'"),
        ("CartPole-v1", {"gravity": 3}, "gymnasium cannot make 'CartPole-v1'"),
    ]:
        with pytest.raises(InputError, match=message):
            achieved_returns(model, task, Trial(environment=environment, options=options, returns=(1.0,)))
    for changes, message in [
        ({"returns": ()}, r"returns: expected finite numbers to ask for, got \[\]"),
        ({"returns": (float("inf"),)}, r"returns: expected finite numbers to ask for, got \[inf\]"),
        ({"episodes": 0}, "episodes: expected 1 or more, got 0"),
        ({"max_steps": 0}, "max_steps: expected 1 or more, got 0"),
    ]:
        with pytest.raises(InputError, match=message):
            trial(task, **changes)
    assert config.environment_options == {"max_episode_steps": 30}


def test_a_table_and_a_picture(tmp_path: Path):
    results = {10.0: [8.0, 12.0], 5.0: [4.0, 4.0]}
    table = returns_table(results, 7.0)
    assert [line.split() for line in table] == [
        ["asked", "achieved", "deviation", "least", "largest"],
        ["5", "4", "0", "4", "4"],
        ["10", "10", "2", "8", "12"],
        ["mean", "of", "the", "training", "episodes:", "7"],
    ]
    draw_returns(tmp_path / "a.png", [Panel("one", results, {"data's mean": 7.0}), Panel("two", results, {})])
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def recipe(**changes: Any) -> Recipe:
    training = {"steps": 4, "engine": {"device": "cpu"}, "saving": {"checkpoint_every": 2}}
    task = {"kind": "act", "context": 5, "batch_tokens": 240}
    data = {"path": CART, "validation_fraction": 0.2}
    whole = {"task": task, "model": "dt-tiny", "data": data, "schedule": "constant", "training": training}
    return Recipe.from_dict({**whole, **changes})


def test_a_model_is_trained_and_tried_by_one_command(
    minari_here: Path, tmp_path: Path, capsys: Any, complaint: Callable[..., str]
):
    run, small = str(tmp_path / "run"), ("--model", "dt-tiny", "--steps", "4", "--device", "cpu")
    assert main(["train", "dt", "--data", CART, *small, "--out", run]) == 0
    said = capsys.readouterr().out
    assert "CartPole-v1: 20 episodes per target return" in said
    assert "mean of the training episodes: " in said
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert len(facts["achieved"]) >= 3
    assert all(len(returns) == 20 for returns in facts["achieved"].values())
    picture = tmp_path / "run" / "returns.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    picture.unlink()
    assert main(["evaluate", run, "--returns", "9,30", "--episodes", "2", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"Drawn: {picture}"
    assert [line.split()[0] for line in lines[-5:-2]] == ["asked", "9", "30"]
    assert picture.is_file()
    assert main(["train", "dt", "--resume", run, "--steps", "5", "--device", "cpu"]) == 2  # a recipe is named
    assert main(["train", "--resume", run, "--steps", "5", "--device", "cpu"]) == 0
    for words, message in [
        (("--returns", "high"), "--returns: expected numbers separated by commas, got 'high'"),
        (("--environment", "Acrobot-v1"), "environment Acrobot-v1: it has observations of 6 numbers"),
        (
            ("--environment", "CartPole-v1"),
            "train with --model.max_timesteps 500, or cut them with --max-steps 128",
        ),
        (("--episodes", "0"), "episodes: expected 1 or more, got 0"),
        (
            ("--data", PENDULUM),
            "observations: expected 4 numbers a step, as the training episodes have, got 3",
        ),
    ]:
        assert message in complaint("evaluate", run, *words)
    capsys.readouterr()
    words = ("--environment", "CartPole-v1", "--max-steps", "7", "--episodes", "2", "--device", "cpu")
    assert main(["evaluate", run, *words]) == 0
    assert "7" in capsys.readouterr().out


def test_a_run_resumes_bit_by_bit_and_stands_without_its_data(
    minari_here: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    complaint: Callable[..., str],
    capsys: Any,
):
    whole, part = fit(recipe(), tmp_path / "whole"), tmp_path / "part"
    short = recipe(training={**recipe().training.to_dict(), "steps": 2})
    fit(short, part)
    again = fit(recipe(), part, resume=True)
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], tensor)
    config = Run.open(part).recipe.task
    assert isinstance(config, ActionPredictionConfig)
    assert (config.environment, config.environment_options) == ("CartPole-v1", {"max_episode_steps": 30})
    assert config.asked is not None
    assert len(config.asked) == 5
    (tmp_path / "lines.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in read(DataConfig(), ROLES, CART))
    )
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "nowhere"))
    words = ("evaluate", str(part), "--data", str(tmp_path / "lines.jsonl"), "--device", "cpu")
    assert main([*words, "--episodes", "1"]) == 0
    assert "CartPole-v1: 1 episodes" in capsys.readouterr().out


def test_episodes_without_returns_are_refused(tmp_path: Path, complaint: Callable[..., str]):
    file = tmp_path / "a.jsonl"
    episode: dict[str, Any] = {"observations": [[0.1], [0.2]], "actions": [0, 1]}
    for rewards, message in [
        ({}, "row 1: no column 'rewards'; it has 'observations', 'actions': an episode needs its rew"),
        ({"gains": [1, 2]}, "say which one is the rewards with columns, as in {rewards: gains}"),
        ({"rewards": None}, "row 1: 'rewards': expected a number, or a list of numbers, for each step"),
        ({"rewards": [1.0, float("nan")]}, "'rewards': not a finite number (NaN, or too large) at step 1"),
    ]:
        file.write_text((json.dumps({**episode, **rewards}) + "\n") * 2)
        words = ("train", "dt", "--data", file, "--model", "dt-tiny", "--out", tmp_path / "run")
        assert message in complaint(*words).split("polyformer: error: ")[1]
        assert not (tmp_path / "run").exists()


def test_longer_episodes_than_the_table_are_refused(
    minari_here: Path, tmp_path: Path, complaint: Callable[..., str]
):
    small = ("--model", "dt-tiny", "--model.max_timesteps", "29", "--out", tmp_path / "run")
    said = complaint("train", "dt", "--data", CART, *small)
    assert (
        "max_timesteps: an episode has 30 steps, and the model's table 29; set --model.max_timesteps 30"
        in said
    )
    assert not (tmp_path / "run").exists()


def test_wrappers_are_recorded_and_put_around_the_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, complaint: Callable[..., str]
):
    pytest.importorskip("minigrid")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    words = ("--policies", "random", "--episodes", "3", "--max-steps", "4", "--out", "grid/seen-v0")
    wrapper = "minigrid.wrappers:ImgObsWrapper"
    assert main(["record", "minigrid:MiniGrid-Empty-5x5-v0", *words, "--wrappers", wrapper]) == 0
    model, task = untrained("minari:grid/seen-v0")
    assert task.rows.state_size == 7 * 7 * 3
    assert task.config.environment_wrappers[0] == wrapper
    config = task.config
    where = Trial(
        environment=config.environment or "",
        options=config.environment_options or {},
        wrappers=config.environment_wrappers,
        returns=(1.0,),
        episodes=2,
    )
    assert len(achieved_returns(model, task, where)[1.0]) == 2
    for wrapper, message in [
        (
            "gymnasium.wrappers:RescaleAction",
            "'gymnasium.wrappers:RescaleAction' does not take this environment",
        ),
        ("mine:Wrapper", "pass --import mine"),
    ]:
        assert message in complaint("record", "CartPole-v1", *words[:-1], "cart-v0", "--wrappers", wrapper)


def test_a_run_makes_no_module_be_imported(tmp_path: Path, minari_here: Path, complaint: Callable[..., str]):
    task = {"kind": "act", "context": 5, "batch_tokens": 240, "environment": "antigravity:CartPole-v1"}
    fit(recipe(task=task), tmp_path / "run")
    said = complaint("evaluate", str(tmp_path / "run"), "--device", "cpu")
    assert (
        "'antigravity' is a module of your own, which a recipe alone does not import; pass --import antigr"
        in said
    )
    assert "antigravity" not in sys.modules


def test_a_run_of_no_known_environment_is_tried_where_that_is_named(
    minari_here: Path, tmp_path: Path, complaint: Callable[..., str], capsys: Any
):
    rows = list(read(DataConfig(), ROLES, CART))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fitted = fit(recipe(data={"path": str(tmp_path / "a.jsonl")}), tmp_path / "run")
    run = str(tmp_path / "run")
    assert fitted.run.recipe.task.to_dict()["environment"] is None
    assert main(["evaluate", run, "--device", "cpu"]) == 0
    assert "asked" not in capsys.readouterr().out
    assert "does not contain the environment of its episodes; name it" in complaint(
        "evaluate", run, "--returns", "5"
    )
    words = ("--environment", "CartPole-v1", "--max-steps", "5", "--returns", "5", "--episodes", "2")
    assert main(["evaluate", run, *words, "--device", "cpu"]) == 0
    assert "asked" in capsys.readouterr().out
