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
    result = TrajectoryConfig(max_timesteps=30, head=PredictionConfig(state_size=5, action_size=3))
    for name, value in {**sizes, **options}.items():
        result = result.override(name, value)
    return result


def model(**options: Any) -> TrajectoryTransformer:
    torch.manual_seed(0)
    return TrajectoryTransformer(config(**options)).double().eval()


def inputs(rows: int = 2, steps: int = 6) -> dict[str, Tensor]:
    torch.manual_seed(1)
    sizes = {"states": 5, "actions": 3, "returns_to_go": 1}
    tensors = {name: torch.randn(rows, steps, size, dtype=torch.float64) for name, size in sizes.items()}
    return {**tensors, "timesteps": torch.arange(steps).repeat(rows, 1)}


@pytest.mark.parametrize(
    ("name", "first"), [("returns_to_go", (3, 3, 3)), ("states", (3, 3, 3)), ("actions", (4, 3, 3))]
)
def test_a_step_sees_what_comes_before_its_action(name: str, first: tuple[int, ...]):
    """Changing step 3: the first actions, states and returns that may say something else."""
    network, batch = model(), inputs()
    changed = {**batch, name: batch[name].clone()}
    changed[name][:, 3] += 1
    before, after = network(**batch), network(**changed)
    for part, start in zip(("actions", "states", "returns"), first):
        moved = (getattr(before, part) != getattr(after, part)).any(-1).any(0)
        assert moved.tolist() == [step >= start for step in range(6)], part


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(side: str):
    network, batch = model(), inputs(steps=8)
    mask = torch.ones(2, 8, dtype=torch.long)
    kept = slice(3, 8) if side == "left" else slice(0, 5)
    mask[1] = 0
    mask[1, kept] = 1
    padded = network(**batch, attention_mask=mask, labels=batch["actions"])
    alone = network(**{name: tensor[1:, kept] for name, tensor in batch.items()})
    torch.testing.assert_close(padded.actions[1:, kept], alone.actions, rtol=1e-12, atol=1e-12)
    errors = (padded.actions - batch["actions"]).square()[mask.bool()]
    torch.testing.assert_close(padded.loss, errors.mean())


def test_actions_are_bounded_where_asked():
    batch = inputs()
    free, bound = model(bounded=False)(**batch).actions, model(bounded=True)(**batch).actions
    torch.testing.assert_close(bound, free.tanh())


def test_it_learns_an_action_that_hangs_on_the_return():
    torch.manual_seed(0)
    network = TrajectoryTransformer(config(bounded=False, dropout=0.0, embedding_dropout=0.0))
    batch = {name: x.float() if x.is_floating_point() else x for name, x in inputs(16).items()}
    labels = batch["returns_to_go"] * torch.tensor([1.0, -1.0, 0.5])
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    losses = []
    for _ in range(60):
        loss = network(**batch, labels=labels).loss
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
            lambda x: x[..., :4],
            r"states: expected \[batch, steps, 5\] \(2, 6, 5\), got",
        ),
        ("returns_to_go", lambda x: x[..., 0], r"returns_to_go: expected \[batch, steps, 1\]"),
        ("timesteps", lambda x: x.double(), r"timesteps: expected integers \[batch, steps\]"),
        ("timesteps", lambda x: x + 30, r"timesteps: expected 0 to 29 \(max_timesteps\), got 30 to 35"),
    ],
)
def test_what_does_not_fit_is_named(name: str, change: Any, message: str):
    batch = inputs()
    with pytest.raises(InputError, match=message):
        model()(**{**batch, name: change(batch[name])})


def test_labels_and_options_are_checked():
    with pytest.raises(InputError, match=r"labels: expected actions \(2, 6, 3\), got \(2, 6, 1\)"):
        model()(**inputs(), labels=torch.zeros(2, 6, 1))
    with pytest.raises(InputError, match="state_size: expected 1 number or more, got 0"):
        PredictionConfig(state_size=0)
    with pytest.raises(InputError, match="max_timesteps: expected 1 or more, got 0"):
        dataclasses.replace(TrajectoryConfig(), max_timesteps=0)
