"""Policies in environments: the state travels with the collector, training sees what acting saw."""

import dataclasses
import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forking import run_python
from polyformer import InputError
from polyformer.cli.main import main
from polyformer.core.files import read_tensors
from polyformer.core.state import save_state
from polyformer.models.architectures import Policy, PolicyConfig
from polyformer.models.presets import model_config
from polyformer.training.recipes import Recipe, Run, fit
from polyformer.training.rl import MEMORY, Rollout, make_environment
from polyformer.training.tasks import AgentConfig

gymnasium = pytest.importorskip("gymnasium")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchrl")
    from polyformer.training.rl.ppo import Actors, RecurrentTrunk, episodes, objective, rollout

spaces = gymnasium.spaces
ROWS, STEPS = 3, 12
WAY = {"environment": "agents_test/Way-v0"}


class Way(gymnasium.Env):
    """The reward is 1 for the action 1, and the episode ends after some steps of the row's own choice, by the
    rules or (`cut`) from without; what is observed is the step's number and the length."""

    observation_space = spaces.Box(0, 100, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, cut: bool = False):
        self.cut = cut

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.step_number, self.length = 0, int(self.np_random.integers(2, 6))
        return self._seen(), {}

    def step(self, action: int) -> Any:
        self.step_number += 1
        done = self.step_number == self.length
        return self._seen(), float(action), done and not self.cut, done and self.cut, {}

    def _seen(self) -> np.ndarray:
        return np.array([self.step_number, self.length], np.float32)


gymnasium.register("agents_test/Way-v0", Way)


def policy_of(name: str = "gtrxl", observations: int = 2, **options: Any) -> Policy:
    if name == "gtrxl":
        options = {"memory_length": 4, "intermediate_size": 8, **options}
    config = model_config(name, {"hidden_size": 8, "observation_size": observations, **options})
    assert isinstance(config, PolicyConfig)
    torch.manual_seed(0)
    return Policy(dataclasses.replace(config, num_actions=2))


def acted(policy: Policy, seed: int = 5, **options: Any) -> Any:
    torch.manual_seed(1)
    return Actors(policy, WAY["environment"], (), options, ROWS, STEPS).act(seed)


@pytest.mark.parametrize("name", ["gtrxl", "policy-lstm", "policy-feedforward"])
@pytest.mark.parametrize("segment", [3, STEPS])
def test_training_on_runs_computes_what_acting_did(name: str, segment: int):
    """Until the first update the ratio of probabilities is 1, wherever episodes end."""
    policy = policy_of(name)
    steps = acted(policy)
    assert steps["is_init"].sum() > ROWS + 1
    seen = rollout(policy, steps, 0.9, 0.8, segment)
    assert seen.actions.shape == (ROWS * STEPS // segment, segment)
    losses = objective(policy, 0.2, 0.0, 0.5)(seen.tensordict())
    assert float(losses["kl_approx"]) == pytest.approx(0, abs=1e-5)
    assert float(losses["clip_fraction"]) == 0
    torch.testing.assert_close(losses["max_ratio"], torch.tensor(1.0), atol=1e-4, rtol=0)


def test_the_state_goes_from_step_to_step_and_ends_with_the_episode():
    policy = policy_of()
    steps = acted(policy)
    fresh = steps["is_init"].squeeze(-1)[:, 1:]
    before, after = (steps["memory"][:, 1:], steps["next", "memory"][:, :-1])
    assert torch.equal(before["memory"][~fresh], after["memory"][~fresh])
    assert torch.equal(before["age"][~fresh], after["age"][~fresh])
    assert torch.equal(fresh, steps["next", "done"].squeeze(-1)[:, :-1])
    ages = steps["next", MEMORY, "age"].clamp_max(4)
    assert torch.equal(ages, steps["next", "observation"][..., 0].long().clamp_max(4))


@pytest.mark.parametrize("cut", [False, True])
def test_advantages_are_those_of_the_definition(cut: bool):
    """A_t = sum over k of (gamma lambda)^k (r + gamma V' - V), to the episode's end; V' is 0 where it ended,
    and what the policy says of the last state where it was cut."""
    policy = policy_of()
    steps = acted(policy, cut=cut)
    gamma, lambda_ = 0.9, 0.8
    seen = rollout(policy, steps, gamma, lambda_, STEPS)
    values, rewards = (steps["state_value"].squeeze(-1), steps["next", "reward"].squeeze(-1))
    done = steps["next", "done"].squeeze(-1)
    for row in range(ROWS):
        advantage = 0.0
        for t in reversed(range(STEPS)):
            last = steps["next"][row, t][None]
            if done[row, t] and not cut:
                following = 0.0
            elif done[row, t] or t == STEPS - 1:
                none, state = torch.zeros(1, 1, dtype=torch.bool), RecurrentTrunk(policy).state_of(last)
                following = policy(last["observation"][:, None], none, state).values.item()
            else:
                following = values[row, t + 1].item()
            error = rewards[row, t].item() + gamma * following - values[row, t].item()
            going = 0.0 if done[row, t] else 1.0
            advantage = error + gamma * lambda_ * going * advantage
            assert seen.advantages[row, t].item() == pytest.approx(advantage, abs=1e-5)
            target = advantage + values[row, t].item()
            assert seen.targets[row, t].item() == pytest.approx(target, abs=1e-5)


def test_acting_is_a_function_of_seed_weights_and_random_state():
    policy = policy_of()
    first, again, other = acted(policy), acted(policy), acted(policy, seed=6)
    assert torch.equal(first["action"], again["action"])
    assert torch.equal(first["observation"], again["observation"])
    assert not torch.equal(first["observation"], other["observation"])


def test_episodes_end_where_they_end():
    policy = policy_of()
    with torch.no_grad():
        policy.actions.bias.copy_(torch.tensor([0.0, 50.0]))  # always 1
    actors = Actors(policy, WAY["environment"], (), {}, 8, 1)
    returns, lengths = episodes(actors, 3, 100)
    assert torch.equal(returns, lengths.float())
    assert 2 <= int(lengths.min()) < int(lengths.max()) <= 5
    assert episodes(actors, 3, 2)[1].tolist() == [2] * 8


def recipe(steps: int = 6, **task: Any) -> Recipe:
    return Recipe.from_dict(
        {
            "task": {
                "kind": "agent",
                **WAY,
                **{"rows": ROWS, "steps": STEPS, "segment": 4, "passes": 2, "minibatches": 3},
                **{"episodes": 5, "episode_steps": 10},
                **task,
            },
            "model": {"preset": "gtrxl", "hidden_size": 8, "memory_length": 4, "intermediate_size": 8},
            "optimizer": {"kind": "adamw", "lr": 0.03, "weight_decay": 0.0},
            "schedule": "constant",
            "training": {
                "steps": steps,
                "engine": {"device": "cpu"},
                "reporting": {"evaluate_every": 6},
                "saving": {"checkpoint_every": 4},
            },
            "seed": 2,
        }
    )


def test_a_run_learns_and_is_evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    fitted = fit(recipe(60), tmp_path / "run")
    scores = fitted.scores["validation"]
    assert scores["return"] > 0.9 * scores["length"]  # the action 1, nearly always
    assert main(["evaluate", str(tmp_path / "run")]) in (0, None)
    assert f"{scores['return']:.4g}" in capsys.readouterr().out


def test_a_run_goes_on_in_the_middle_of_an_iteration(tmp_path: Path):
    """A checkpoint after 2 of an iteration's 6 updates holds what was collected: the end is the same, bit for
    bit."""
    whole = fit(recipe(14), tmp_path / "whole")
    fit(recipe(8), tmp_path / "parts")
    parts = fit(recipe(14), tmp_path / "parts", resume=True)
    assert whole.result.step == parts.result.step == 14
    files = [fitted.run.folder / "model.safetensors" for fitted in (whole, parts)]
    first, second = map(read_tensors, files)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert whole.scores == parts.scores
    assert isinstance(Run.open(tmp_path / "whole").model("cpu"), Policy)


def test_a_run_goes_on_in_another_process(tmp_path: Path):
    """In the middle of an iteration: what was collected is of a class that nothing has acted with yet."""
    cart = {**recipe(4).to_dict()["task"], "environment": "CartPole-v1"}
    words = {"task": cart, "training": {**recipe(4).training.to_dict(), "steps": 4}}
    fit(Recipe.from_dict({**recipe(4).to_dict(), **words}), tmp_path / "run")
    done = run_python("-m", "polyformer", "train", "--resume", tmp_path / "run", "--steps", 5)
    assert done.returncode == 0, done.stderr
    assert f"resumed {tmp_path / 'run'} at step 4" in done.stdout + done.stderr


def test_collected_steps_are_read_by_another_process(tmp_path: Path):
    """Which knows the class of it before it acts, and without TorchRL."""
    policy = policy_of()
    save_state(rollout(policy, acted(policy), 0.9, 0.8, 4), tmp_path / "memory.safetensors")
    code = (
        "import sys, polyformer.training.tasks\n"
        "from polyformer.core.state import load_state\n"
        "print(type(load_state(sys.argv[1])).__name__, 'torchrl' in sys.modules)"
    )
    done = run_python("-c", code, tmp_path / "memory.safetensors")
    assert done.stdout.split() == [Rollout.__name__, "False"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"environment": "NoSuchThing-v0"}, "gymnasium cannot make 'NoSuchThing-v0'"),
        ({"environment": "popgym:Thing-v0"}, "'module:name'"),
        ({"environment": "nosuchmodule:Thing-v0"}, "does not import; pass --import nosuchmodule"),
        ({"wrappers": ("nosuchmodule:Thing",)}, "does not import; pass --import nosuchmodule"),
        ({"wrappers": ("os:system",)}, "wrappers: expected gymnasium's"),
        ({"environment": "popgym:popgym-BattleshipEasy-v0"}, "MultiDiscrete.*gives a vector; name a wrapper"),
        (
            {"environment": "minigrid:MiniGrid-MemoryS7-v0"},
            "not all of which are vectors of one size; name a",
        ),
        ({"wrappers": ("gymnasium.wrappers:NoSuchWrapper",)}, "wrappers: expected gymnasium's"),
        ({"options": {"nosuch": 1}}, "gymnasium cannot make"),
    ],
)
def test_environments_that_are_unknown_are_refused(changes: dict[str, Any], message: str):
    task = AgentConfig(**{**WAY, **changes}).build()
    with pytest.raises(InputError, match=message):
        task.adapt(PolicyConfig())


def test_the_command_line_refuses_unknown_spaces(tmp_path: Path, complaint: Callable[..., str]):
    out = tmp_path / "run"
    said = complaint("train", "gtrxl", "--task.environment", "popgym:popgym-BattleshipEasy-v0", "--out", out)
    assert (
        "has the actions 'MultiDiscrete([8 8])', and a policy chooses among numbered ones or gives a v"
        in said
    )
    assert not out.exists()


def test_observations_without_a_form_are_refused():
    with pytest.raises(InputError, match="not all of which are vectors of one size; name a wrapper"):
        make_environment("minigrid:MiniGrid-MemoryS7-v0")
    wrappers = ["minigrid.wrappers:ImgObsWrapper"]
    environment = make_environment("minigrid:MiniGrid-MemoryS7-v0", wrappers=wrappers)
    assert environment.observation_space.shape == (7 * 7 * 3,)
    environment = make_environment("popgym:popgym-RepeatPreviousEasy-v0")
    assert environment.observation_space.shape == (4,)  # a choice of four as a vector


@pytest.mark.parametrize("name", ["gymnasium", "torchrl"])
def test_a_library_that_is_not_installed_is_named(name: str, monkeypatch: pytest.MonkeyPatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None if module == name else find(module))
    with pytest.raises(InputError, match=rf"needs {name}: pip install 'polyformer\[agents\]'"):
        AgentConfig(**WAY).build().adapt(PolicyConfig())


def test_another_model_and_data_are_refused(tmp_path: Path):
    wrong = Recipe.from_dict({**recipe().to_dict(), "model": "decoder-tiny"})
    with pytest.raises(InputError, match="needs a policy, such as the preset gtrxl"):
        fit(wrong, tmp_path / "run")
    wrong = Recipe.from_dict({**recipe().to_dict(), "data": {"path": "somewhere"}})
    with pytest.raises(InputError, match="data: the task 'agent' makes its own"):
        fit(wrong, tmp_path / "run")
