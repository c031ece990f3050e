"""Losses of states and returns, hidden observations, and rewards at the end of an episode."""

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from polyformer.models.architectures import TrajectoryTransformer
from polyformer.models.presets import model_config
from polyformer_lab.trajectories import DelayedRewards, VariedActionConfig, VariedActions


def varied(rows: list[dict[str, Any]], **options: Any) -> VariedActions:
    return VariedActions(VariedActionConfig(context=4, **options).resolve(rows))


def episodes() -> list[dict[str, Any]]:
    draw = np.random.default_rng(0)
    return [
        {
            "observations": draw.normal(size=(length, 4)).tolist(),
            "actions": draw.integers(2, size=length).tolist(),
            "rewards": [1.0] * length,
        }
        for length in (3, 6)
    ]


def test_the_next_state_and_return_of_each_step_are_predicted():
    rows, options = episodes(), {"initializer_range": 0.5}
    model = TrajectoryTransformer(varied(rows).adapt(model_config("dt-tiny", options))).eval()
    _, batch = next(varied(rows).rows.training_batches(rows, 0).epoch(0))
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    with torch.no_grad():
        output = model(**inputs)
        losses = [
            varied(rows, **weights).objective.loss(model, batch)
            for weights in ({}, {"state_weight": 2.0}, {"return_weight": 3.0})
        ]
    steps = [
        (row, step)
        for row, real in enumerate(batch["attention_mask"].tolist())
        for step in range(3)
        if real[step]
    ]
    assert 0 < len(steps) < 3 * len(batch["labels"]), "some windows are padded"
    for weight, loss, predicted, actual in (
        (2, losses[1], output.states, batch["states"]),
        (3, losses[2], output.returns, batch["returns_to_go"]),
    ):
        errors = [(predicted[row, step] - actual[row, step + 1]).square().mean() for row, step in steps]
        assert float(loss - losses[0]) == pytest.approx(weight * float(torch.stack(errors).mean()), rel=1e-4)


def test_hidden_places_are_zero():
    states = varied(episodes(), hidden=(1, 3)).rows.scaled_states(np.ones((2, 4)))
    assert (states != 0).tolist() == [[True, False, True, False]] * 2


def test_all_rewards_come_at_the_last_step():
    plain, delayed = (wrap(gymnasium.make("CartPole-v1")) for wrap in (lambda env: env, DelayedRewards))
    for _ in range(2):
        for environment in (plain, delayed):
            environment.reset(seed=0)
        rewards: list[float] = []
        ended = False
        while not ended:
            seen, _, ended, *_ = plain.step(1)
            other, reward, *_ = delayed.step(1)
            rewards.append(float(reward))
            assert (seen == other).all()
        assert rewards == [0.0] * (len(rewards) - 1) + [len(rewards)]
