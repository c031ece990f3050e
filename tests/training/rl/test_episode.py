"""An episode drawn: a film of as many frames as steps, a sheet, and what is refused."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from polyformer import create_model
from polyformer.cli.main import main
from polyformer.models.architectures import Policy
from polyformer.training.recipes import Recipe, fit
from polyformer.training.recipes.recipe import find_recipe, merged
from polyformer.training.rl import make_environment
from polyformer.training.rl.playing import BRIGHT, DARK, MARGIN, SIDE, Episode, draw_gif, play_episode
from tiny_recipes import TEXT, tiny_recipe

Image = pytest.importorskip("PIL.Image")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchrl")
pytest.importorskip("gymnasium")


def run(folder: Path, model: dict[str, Any]) -> str:
    changes = {
        "task": {"environment": "CartPole-v1", "rows": 2, "steps": 8, "segment": 4, "passes": 1},
        "training": {"steps": 1, "engine": {"device": "cpu"}},
    }
    task = {"minibatches": 1, "episodes": 1, "episode_steps": 40, **changes["task"]}
    fit(Recipe.from_dict({**merged(find_recipe("gtrxl"), {**changes, "task": task}), "model": model}), folder)
    return str(folder)


def test_a_film_has_a_frame_for_each_step(tmp_path: Path, capsys: Any, complaint: Callable[..., str]):
    model = {"preset": "gtrxl", "hidden_size": 8, "memory_length": 4, "intermediate_size": 8}
    folder = run(tmp_path / "run", model)
    capsys.readouterr()
    assert main(["evaluate", folder, "--episode", str(tmp_path / "a.gif"), "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    with Image.open(tmp_path / "a.gif") as film:
        assert film.format == "GIF"
        assert said.startswith(f"{film.n_frames} steps, return {film.n_frames}: ")  # a reward of 1 a step
        assert film.n_frames > 5
    assert main(["evaluate", folder, "--episode", str(tmp_path / "a.png"), "--device", "cpu"]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert (
        "--episode: expected a file name that ends with one of .gif, .png, .svg, .pdf, got 'a.mp4'"
        in complaint("evaluate", folder, "--episode", "a.mp4")
    )
    blind = run(tmp_path / "blind", {"preset": "policy-feedforward", "hidden_size": 8})
    assert "attends to nothing; take one with a decoder" in complaint("evaluate", blind, "--episode", "a.gif")


def test_frames_show_the_weights_and_equal_ones_stay_apart(tmp_path: Path):
    weights = torch.zeros(1, 2, 5, 1 + 3)
    weights[0, 0, :, 0] = 1.0  # the first head attends to now, the second to three steps ago
    weights[0, 1, :, 3] = 1.0
    same = Episode(weights, [0.0] * 5, np.tile([1.0, 0.0], (5, 1)), [])
    draw_gif(tmp_path / "a.gif", same)
    with Image.open(tmp_path / "a.gif") as film:
        assert film.n_frames == 5
        pixels = np.asarray(film.convert("RGB")).astype(float)
    left, right = pixels.shape[1] - MARGIN - SIDE, pixels.shape[1] - MARGIN
    top, bottom = MARGIN + SIDE // 4, MARGIN + 3 * SIDE // 4
    for row, column, colour in [
        (top, right - 5, BRIGHT),
        (top, left + 5, DARK),
        (bottom, left + 5, BRIGHT),
        (bottom, right - 5, DARK),
    ]:
        assert np.abs(pixels[row, column] - colour).max() < 12


def test_the_environment_draws_itself_where_it_can():
    policy = create_model("gtrxl", hidden_size=8, memory_length=4, intermediate_size=8, num_actions=2)
    assert isinstance(policy, Policy)
    environment = make_environment("CartPole-v1", {"render_mode": "rgb_array"})
    pytest.importorskip("pygame")
    episode = play_episode(policy.eval(), environment, 0, 3)
    assert [picture.shape for picture in episode.pictures] == [(400, 600, 3)] * 3
    assert episode.weights.shape == (1, 2, 3, 5)
    assert not play_episode(policy, make_environment("CartPole-v1"), 0, 3).pictures


def test_a_run_of_another_task_is_refused(tmp_path: Path, complaint: Callable[..., str]):
    (tmp_path / "lines.txt").write_text(TEXT)
    fit(tiny_recipe(tmp_path / "lines.txt"), tmp_path / "run")
    assert "--episode: requires a run of the task 'agent', and " in complaint(
        "evaluate", str(tmp_path / "run"), "--episode", "a.gif"
    )
