"""Policies whose actions are vectors: distributions, bounds, training that goes on, and recording them."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from polyformer import InputError
from polyformer.cli.main import main
from polyformer.core.files import read_tensors
from polyformer.data import DataConfig, read
from polyformer.data.episodes import ROLES
from polyformer.models.architectures import Policy
from polyformer.models.presets import model_config
from polyformer.training.recipes import Recipe, fit
from polyformer.training.rl import make_environment, rescale_action, scale_actions
from polyformer.training.rl.playing import PolicyPlayer, source_of
from polyformer.training.tasks import AgentConfig

gymnasium = pytest.importorskip("gymnasium")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchrl")
    from polyformer.training.rl.ppo import Actors, objective, rollout

SIZES = {"hidden_size": 8, "memory_length": 4, "intermediate_size": 8}
ROWS, STEPS = 3, 12


class Aim(gymnasium.Env):
    """An episode is a step: a number is seen, and its triple is to be said."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Box(-4, 6, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.seen = self.np_random.uniform(-1, 1, 1).astype(np.float32)
        return self.seen, {}

    def step(self, action: np.ndarray) -> Any:
        return self.seen, -float(abs(action - 3 * self.seen).sum()), True, False, {}


gymnasium.register("agents_test/Aim-v0", Aim)


def pendulum_policy() -> Policy:
    task = AgentConfig(environment="Pendulum-v1").build()
    torch.manual_seed(0)
    policy = Policy(task.adapt(model_config("gtrxl", SIZES)))
    with torch.no_grad():
        policy.actions.weight.mul_(50)
        policy.log_deviations.fill_(-0.5)
    return policy


def test_probabilities_are_those_of_a_normal_distribution():
    policy = pendulum_policy()
    assert (policy.config.num_actions, policy.config.continuous) == (1, True)
    torch.manual_seed(1)
    steps = Actors(policy, "Pendulum-v1", (), {}, ROWS, STEPS).act(5)
    with torch.no_grad():
        output = policy(steps["observation"], steps["is_init"].squeeze(-1))
    mean, deviation, action = output.logits, np.exp(-0.5), steps["action"]
    expected = -((action - mean) ** 2) / (2 * deviation**2) - np.log(deviation * np.sqrt(2 * np.pi))
    torch.testing.assert_close(steps["action_log_prob"], expected.sum(-1), atol=1e-4, rtol=1e-4)
    own = policy.distribution(mean).log_prob(action)
    torch.testing.assert_close(own, expected.sum(-1), atol=1e-4, rtol=1e-4)
    assert mean.std() > 0.05
    losses = objective(policy, 0.2, 0.01, 0.5)(rollout(policy, steps, 0.9, 0.8, 4).tensordict())
    torch.testing.assert_close(losses["max_ratio"], torch.tensor(1.0), atol=1e-3, rtol=0)
    sum(losses[name] for name in ("loss_objective", "loss_entropy")).backward()
    assert policy.log_deviations.grad is not None
    assert float(policy.log_deviations.grad.abs()) > 0


def test_actions_count_from_one_bound_to_the_other():
    high = np.array([3, 7, np.inf], np.float32)
    space = gymnasium.spaces.Box(np.array([-1, 5, 0], np.float32), high)
    for action, expected in [((-1, -1, -1), (-1, 5, 0)), ((1, 1, 1), (3, 7, 1)), ((0, 0, 9), (1, 6, 9))]:
        np.testing.assert_allclose(rescale_action(space, np.array(action, np.float32)), expected)
    np.testing.assert_array_equal(rescale_action(space, np.full(3, -50.0)), (-1, 5, 0))
    assert rescale_action(space, np.zeros(3)).dtype == np.float32
    environment = scale_actions(make_environment("Pendulum-v1"))
    environment.reset(seed=0)
    environment.step(np.array([0.5], np.float32))
    assert environment.unwrapped.last_u == 1.0  # of bounds of 2
    cart = make_environment("CartPole-v1")
    assert scale_actions(cart) is cart


def recipe(updates: int, **changes: Any) -> Recipe:
    task = {"kind": "agent", "environment": "Pendulum-v1", "rows": ROWS, "steps": STEPS, "segment": 4}
    task |= {"passes": 2, "minibatches": 3, "episodes": 2, "episode_steps": 5}
    return Recipe.from_dict(
        {
            "task": {**task, **changes},
            "model": {"preset": "gtrxl", **SIZES},
            "optimizer": {"kind": "adamw", "lr": 0.03, "weight_decay": 0.0},
            "schedule": "constant",
            "training": {
                "steps": updates,
                "engine": {"device": "cpu"},
                "reporting": {"evaluate_every": 6},
                "saving": {"checkpoint_every": 4},
            },
        }
    )


def test_a_policy_learns_where_to_aim(tmp_path: Path):
    """It misses by far less than at first, and its deviation becomes small."""
    aim = {"environment": "agents_test/Aim-v0", "rows": 18, "steps": 16, "episodes": 64}
    begin = fit(recipe(1, **aim), tmp_path / "begin").scores["validation"]["return"]
    fitted = fit(recipe(96, **aim), tmp_path / "run")
    assert fitted.scores["validation"]["return"] > 0.3 * begin
    assert float(read_tensors(fitted.run.folder / "model.safetensors")["log_deviations"]) < -0.5


def test_a_run_goes_on_and_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, complaint: Callable[..., str], capsys: Any
):
    whole = fit(recipe(8), tmp_path / "whole")
    fit(recipe(4), tmp_path / "parts")
    parts = fit(recipe(8), tmp_path / "parts", resume=True)
    first, second = (read_tensors(run.run.folder / "model.safetensors") for run in (whole, parts))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert first["log_deviations"].any()
    assert whole.scores == parts.scores

    pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    run = str(tmp_path / "whole")
    words = ("--policies", run, "--noise", "0", "--episodes", "2", "--max-steps", "6", "--out")
    assert main(["record", "Pendulum-v1", *words, "pendulum/learnt-v0"]) == 0
    rows = list(read(DataConfig(), ROLES, "minari:pendulum/learnt-v0"))
    assert [len(row["actions"]) for row in rows] == [6, 6]
    assert np.abs([row["actions"] for row in rows]).max() <= 2
    # the first episode again: the seed's generator gives its noise, then its share of random actions
    policy = whole.run.model("cpu").eval()
    assert isinstance(policy, Policy)
    player = source_of(policy, make_environment("Pendulum-v1"))(np.random.default_rng(0))
    again = [player(np.array(seen, np.float32)) for seen in rows[0]["observations"]]
    np.testing.assert_allclose(np.array(again), rows[0]["actions"], atol=1e-6)
    message = "1 numbers in an action, and the environment has observations of 4 numbers and 2 choices"
    assert message in complaint("record", "CartPole-v1", *words, "cart/other-v0")


def test_a_policy_of_a_run_is_the_most_probable_action_without_a_generator():
    policy = pendulum_policy()
    environment = make_environment("Pendulum-v1")
    seen = np.array([1.0, 0.0, 0.5], np.float32)
    sure = PolicyPlayer(policy, environment.action_space)(seen)
    with torch.no_grad():
        mean = policy(torch.from_numpy(seen)[None, None]).logits[0, 0].numpy()
    np.testing.assert_allclose(sure, np.clip(2 * mean, -2, 2), rtol=1e-5)
    with pytest.raises(InputError, match="policies: a policy was trained on observations of 3 numbers"):
        source_of(policy, make_environment("CartPole-v1"))
