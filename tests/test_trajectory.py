"""The model of trajectories: what sees what, padding, its loss, what is refused, and that it learns."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.model import PredictionConfig, TrajectoryConfig, TrajectoryTransformer


def config(**options: Any) -> TrajectoryConfig:
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 20, "hidden_size": 12}
    found = TrajectoryConfig(max_timesteps=30, head=PredictionConfig(state_size=5, action_size=3))
    for name, value in {**sizes, **options}.items():
        found = found.override(name, value)
    return found


def model(**options: Any) -> TrajectoryTransformer:
    torch.manual_seed(0)
    return TrajectoryTransformer(config(**options)).double().eval()


def inputs(rows: int = 2, steps: int = 6) -> dict[str, Tensor]:
    torch.manual_seed(1)
    sizes = {"states": 5, "actions": 3, "returns_to_go": 1}
    found = {name: torch.randn(rows, steps, size, dtype=torch.float64) for name, size in sizes.items()}
    return {**found, "timesteps": torch.arange(steps).repeat(rows, 1)}


@pytest.mark.parametrize(
    ("name", "first"), [("returns_to_go", (3, 3, 3)), ("states", (3, 3, 3)), ("actions", (4, 3, 3))]
)
def test_a_step_sees_what_comes_before_its_action(name: str, first: tuple[int, ...]):
    """Changing step 3: the first actions, states and returns that may say something else."""
    made, given = model(), inputs()
    changed = {**given, name: given[name].clone()}
    changed[name][:, 3] += 1
    before, after = made(**given), made(**changed)
    for part, start in zip(("actions", "states", "returns"), first):
        moved = (getattr(before, part) != getattr(after, part)).any(-1).any(0)
        assert moved.tolist() == [step >= start for step in range(6)], part


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(side: str):
    made, given = model(), inputs(steps=8)
    mask = torch.ones(2, 8, dtype=torch.long)
    kept = slice(3, 8) if side == "left" else slice(0, 5)
    mask[1] = 0
    mask[1, kept] = 1
    padded = made(**given, attention_mask=mask, labels=given["actions"])
    alone = made(**{name: one[1:, kept] for name, one in given.items()})
    torch.testing.assert_close(padded.actions[1:, kept], alone.actions, rtol=1e-12, atol=1e-12)
    errors = (padded.actions - given["actions"]).square()[mask.bool()]
    torch.testing.assert_close(padded.loss, errors.mean())


def test_actions_are_bounded_where_asked():
    given = inputs()
    free, bound = model(bounded=False)(**given).actions, model(bounded=True)(**given).actions
    torch.testing.assert_close(bound, free.tanh())


def test_it_learns_an_action_that_hangs_on_the_return():
    torch.manual_seed(0)
    made = TrajectoryTransformer(config(bounded=False, dropout=0.0, embedding_dropout=0.0))
    given = {name: one.float() if one.is_floating_point() else one for name, one in inputs(16).items()}
    labels = given["returns_to_go"] * torch.tensor([1.0, -1.0, 0.5])
    optimizer = torch.optim.Adam(made.parameters(), 1e-2)
    losses = []
    for _ in range(60):
        loss = made(**given, labels=labels).loss
        assert loss is not None
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "states",
            lambda one: one[..., :4],
            r"states: expected \[batch, steps, 5\] \(2, 6, 5\), got",
        ),
        ("returns_to_go", lambda one: one[..., 0], r"returns_to_go: expected \[batch, steps, 1\]"),
        ("timesteps", lambda one: one.double(), r"timesteps: expected integers \[batch, steps\]"),
        ("timesteps", lambda one: one + 30, r"timesteps: expected 0 to 29 \(max_timesteps\), got 30 to 35"),
    ],
)
def test_what_does_not_fit_is_named(name: str, change: Any, message: str):
    given = inputs()
    with pytest.raises(InputError, match=message):
        model()(**{**given, name: change(given[name])})


def test_labels_and_options_are_checked():
    with pytest.raises(InputError, match=r"labels: expected actions \(2, 6, 3\), got \(2, 6, 1\)"):
        model()(**inputs(), labels=torch.zeros(2, 6, 1))
    with pytest.raises(InputError, match="state_size: expected 1 number or more, got 0"):
        PredictionConfig(state_size=0)
    with pytest.raises(InputError, match="max_timesteps: expected 1 or more, got 0"):
        dataclasses.replace(TrajectoryConfig(), max_timesteps=0)
