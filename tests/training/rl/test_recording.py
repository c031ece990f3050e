"""Recording: mixtures of returns, the same for the same seed, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import minari
import numpy as np
import pytest

from polyformer import InputError
from polyformer.cli.main import main
from polyformer.data import DataConfig, read
from polyformer.data.episodes import ROLES
from polyformer.training.rl import make_environment
from polyformer.training.rl.recording import (
    SCRIPTED,
    Recording,
    half_trained,
    play_and_record,
    random,
    record,
)


def test_recordings_are_read_alike_by_minari_and_by_us(minari_here: Path):
    rows = list(read(DataConfig(), ROLES, "minari:cart/mixed-v0"))
    dataset = minari.load_dataset("cart/mixed-v0")
    assert len(rows) == dataset.total_episodes == 24
    for row, episode in zip(rows, dataset.iterate_episodes()):
        assert row["rewards"] == episode.rewards.tolist()
        assert row["actions"] == episode.actions.tolist()
        assert row["observations"] == episode.observations[:-1].tolist()
        assert episode.truncations[-1] == (len(episode) == 30)
    returns = [sum(row["rewards"]) for row in rows]
    assert min(returns) < 15
    assert max(returns) == 30
    environment = dataset.recover_environment()
    episode = next(iter(dataset.iterate_episodes()))
    metadata = next(iter(dataset.storage.get_episode_metadata([0])))
    seen, _ = environment.reset(seed=metadata["seed"])
    for action, after in zip(episode.actions, episode.observations):
        np.testing.assert_array_equal(seen, after)
        seen = environment.step(action)[0]


def test_a_recording_can_be_repeated(minari_here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    before = list(read(DataConfig(), ROLES, "minari:cart/mixed-v0"))
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    recording = {"environment": "CartPole-v1", "episodes": 24, "max_steps": 30}
    record(Recording(out="cart/mixed-v0", **recording))
    assert list(read(DataConfig(), ROLES, "minari:cart/mixed-v0")) == before
    record(Recording(out="cart/other-v0", seed=1, **recording))
    assert list(read(DataConfig(), ROLES, "minari:cart/other-v0")) != before


@pytest.mark.parametrize("name", sorted(set(SCRIPTED) - {"CartPole-v0"}))
def test_scripted_policies_are_far_above_chance(name: str):
    environment = make_environment(name)
    chance = random(environment, 0)(np.random.default_rng(0))
    by = {
        policy: np.mean([sum(play_and_record(environment, policy, seed).rewards) for seed in range(4)])
        for policy in (SCRIPTED[name], chance)
    }
    scripted, random_one = by.values()
    goal = {"CartPole-v1": 400, "Pendulum-v1": -400, "Acrobot-v1": -150, "MountainCar-v0": -150}.get(name, 80)
    assert scripted > goal > random_one


def test_a_half_trained_policy_is_above_chance():
    environment = make_environment("CartPole-v1", {"max_episode_steps": 100})
    generator = np.random.default_rng(0)
    sources = [half_trained(environment, 0), random(environment, 0)]
    trained, chance = (
        np.mean([sum(play_and_record(environment, source(generator), seed).rewards) for seed in range(5)])
        for source in sources
    )
    assert trained > 1.5 * chance


def test_the_command_line_records_and_says_what_is_wrong(
    minari_here: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    complaint: Callable[..., str],
    capsys: Any,
):
    exists = complaint("record", "CartPole-v1", "--out", "cart/mixed-v0")
    assert "is there already; choose another id, or `minari delete cart/mixed-v0`" in exists
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    words = ("record", "CartPole-v1", "--episodes", "3", "--max-steps", "9", "--policies", "random, scripted")
    assert main([*words, "--out", "cart/new-v0"]) == 0
    said = capsys.readouterr().out
    assert "3 episodes of CartPole-v1; returns: mean 9, minimum 9" in said
    assert said.endswith("minari:cart/new-v0\n")
    for arguments, message in [
        (("CartPole-v1",), "--out is missing: name the new data set, for example cartpole/mixed-v0"),
        (
            ("CartPole-v1", "--out", "a b"),
            "--out a b: expected an id such as cartpole/mixed-v0, with a version",
        ),
        (
            ("CartPol-v1", "--out", "a-v0"),
            "gymnasium cannot make 'CartPol-v1': Environment `CartPol` doesn't exist",
        ),
        (
            ("no_module:X-v0", "--out", "a-v0"),
            "'no_module' is a module of your own, which a recipe alone does not import; pass --import no_mod",
        ),
        (
            ("popgym:popgym-BattleshipEasy-v0", "--out", "a-v0"),
            "has the actions 'MultiDiscrete([8 8])', and a policy chooses among numbered ones or",
        ),
        (
            ("minigrid:MiniGrid-MemoryS7-v0", "--out", "a-v0"),
            "not all of which are vectors of one size; name a wrapper",
        ),
        (("phys2d/CartPole-v1", "--out", "a-v0"), "gymnasium cannot make 'phys2d/CartPole-v1'"),
    ]:
        assert message in complaint("record", *arguments)
    assert not (tmp_path / "a-v0").exists()


def test_an_environment_without_a_script_or_an_end_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import gymnasium

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    cart = gymnasium.spec("CartPole-v1")
    gymnasium.register("Endless-v0", entry_point=cart.entry_point)
    try:
        with pytest.raises(InputError, match="its episodes may never end; cut them with --max-steps"):
            record(Recording(environment="Endless-v0", out="a-v0", policies=("random",)))
        with pytest.raises(InputError, match="no scripted policy for Endless-v0, only for CartPole-v0"):
            record(Recording(environment="Endless-v0", out="a-v0", max_steps=5))
    finally:
        gymnasium.registry.pop("Endless-v0")
