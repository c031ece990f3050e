"""The policies of GTrXL's claims are of equal size, and what an episode of theirs attends to."""

import warnings
from typing import Any

import pytest
import torch

from polyformer import InputError
from polyformer.models.architectures import Policy, PolicyConfig, build_model
from polyformer.models.presets import create_model, model_config
from polyformer.training.recipes import Recipe
from polyformer_lab.study import Study

pytest.importorskip("popgym")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchrl.collectors")
from polyformer.training.rl import make_environment
from polyformer.training.rl.playing import play_episode


def test_policies_are_of_the_width_that_comes_nearest_in_parameters():
    study = Study.load("gtrxl")
    policies = {name: change["model"] for name, change in study.grid["policy"].items()}
    recipe = Recipe.from_dict({**study.base, "model": policies["gtrxl"], "optimizer": "adamw"})
    sizes = recipe.task.build(None).adapt(PolicyConfig())
    fixed = {name: getattr(sizes, name) for name in ("observation_size", "num_actions", "continuous")}

    def parameters(model: dict[str, Any], wider: int = 0) -> int:
        width = model["hidden_size"] + wider
        inner = {"intermediate_size": 2 * width} if "intermediate_size" in model else {}
        options: Any = {**model, **fixed, **inner, "hidden_size": width}
        with torch.device("meta"):
            built = build_model(model_config(options.pop("preset"), options))
        return sum(parameter.numel() for parameter in built.parameters())

    goal = parameters(policies.pop("gtrxl"))
    for name, model in policies.items():
        narrow, own, wide = (abs(parameters(model, wider) - goal) for wider in (-2, 0, 2))
        assert own == min(narrow, own, wide) < goal / 10, name


def test_the_weights_of_an_episode_are_those_of_its_steps():
    policy = create_model("gtrxl", hidden_size=8, memory_length=5, intermediate_size=8)
    assert isinstance(policy, Policy)
    environment = make_environment("popgym:popgym-RepeatPreviousEasy-v0")
    episode = play_episode(policy, environment, 0, 9)
    weights, rewards = episode.weights.mean(1), episode.rewards
    assert episode.weights.shape == (1, 2, 9, 1 + 5)
    assert len(rewards) == 9
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 9))
    assert not weights[0, 2, 3:].any()  # before the first step there was none
    assert weights[0, 2, :3].all()
    alone = create_model("policy-feedforward", hidden_size=8)
    assert isinstance(alone, Policy)
    with pytest.raises(InputError, match="attends to nothing"):
        play_episode(alone, environment, 0, 9)
