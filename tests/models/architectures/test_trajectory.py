"""The model of trajectories: what sees what, padding, its loss, what is refused, and that it learns."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.patterns.composition import MaskModPattern
from polyformer.core.errors import InputError
from polyformer.models.architectures import PredictionConfig, TrajectoryConfig, TrajectoryTransformer


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
        ("states", lambda x: x[..., :4], r"states: expected \[batch, steps, 5\] \(2, 6, 5\), got"),
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
    with pytest.raises(InputError, match="state_size: expected 1 or more, got 0"):
        PredictionConfig(state_size=0)
    with pytest.raises(InputError, match="max_timesteps: expected 1 or more, got 0"):
        dataclasses.replace(TrajectoryConfig(), max_timesteps=0)


def acted(network: TrajectoryTransformer, batch: dict[str, Tensor], context: int | None = None) -> Tensor:
    """Actions [B, T, A], asked for step by step."""
    state, previous, actions = None, None, []
    for step in range(batch["timesteps"].shape[1]):
        now = {name: tensor[:, step] for name, tensor in batch.items()}
        action, state = network.act(
            now["states"], now["returns_to_go"], now["timesteps"], previous, state, context
        )
        actions.append(action)
        previous = now["actions"]
    return torch.stack(actions, 1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"attention": "Window(7)"},
        {"decoder.position": "alibi"},
        {"decoder.position": "learned", "bounded": False},
        {"attention": "performer"},
        {"num_hidden_groups": 1, "block": "post"},
    ],
)
def test_acting_step_by_step_is_a_single_pass(options: dict[str, Any]):
    """K5: at float64, with and without gradients; nothing is dropped while the context is not full."""
    network, batch = model(**options), inputs(steps=9)
    expected = network(**batch).actions
    torch.testing.assert_close(acted(network, batch), expected, rtol=0, atol=1e-10)
    with torch.no_grad():
        torch.testing.assert_close(acted(network, batch), expected, rtol=0, atol=1e-10)
        torch.testing.assert_close(acted(network, batch, context=9), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("context", [2, 3, 5])
def test_acting_with_a_context_sees_its_last_steps_alone(context: int):
    """A single pass in which a call's tokens (the last action, a return, a state) see `context` steps."""

    def recent(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx <= q_idx) & (kv_idx // 3 > (q_idx + 1) // 3 - context)

    network, batch = model(), inputs(steps=9)
    masked = model()
    for layer in masked.decoder.sequence:
        mechanism: Any = layer.get_submodule("attention.mechanism")
        mechanism.config = SoftmaxConfig(pattern=MaskModPattern(recent))
    with torch.no_grad():
        expected, actual = masked(**batch).actions, acted(network, batch, context)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)
        assert not torch.allclose(actual, network(**batch).actions)
        alone = [network(**{name: x[:, step : step + 1] for name, x in batch.items()}) for step in range(9)]
        actions = torch.cat([output.actions for output in alone], 1)
        torch.testing.assert_close(acted(network, batch, 1), actions, rtol=0, atol=1e-10)


def test_a_step_of_acting_runs_three_tokens_and_keeps_no_more_than_its_context():
    network, batch, sizes = model(), inputs(steps=9), []
    network.decoder.register_forward_pre_hook(lambda module, arguments: sizes.append(arguments[0].shape[1]))
    acted(network, batch, context=4)
    assert sizes == [2] + [3] * 8
    now = {name: tensor[:, 0] for name, tensor in batch.items()}
    state, previous = None, None
    for step in range(9):
        _, state = network.act(
            now["states"], now["returns_to_go"], now["timesteps"] + step, previous, state, 4
        )
        previous = now["actions"]
        assert state.length == min(3 * step + 2, 3 * 4 - 1)


def test_episodes_that_end_leave_the_state():
    network, batch = model(), inputs(rows=3, steps=4)
    expected = network(**batch).actions[[0, 2], 3]
    state, previous, kept = None, None, torch.tensor([0, 2])
    with torch.no_grad():
        for step in range(4):
            now = {name: tensor[:, step] for name, tensor in batch.items()}
            if step == 2:
                assert state is not None
                assert previous is not None
                state, previous = state.reorder(kept), previous[kept]
            rows = kept if step >= 2 else torch.arange(3)
            action, state = network.act(
                now["states"][rows], now["returns_to_go"][rows], now["timesteps"][rows], previous, state
            )
            previous = now["actions"][rows]
    torch.testing.assert_close(action, expected, rtol=0, atol=1e-10)


def test_acting_names_what_does_not_fit():
    network = model()
    now = {name: tensor[:, 0] for name, tensor in inputs().items()}
    first = now["states"], now["returns_to_go"], now["timesteps"]
    _, state = network.act(*first)
    with pytest.raises(InputError, match="previous and state: expected both from the second step on"):
        network.act(*first, state=state)
    with pytest.raises(InputError, match=r"actions: expected \[batch, steps, 3\]"):
        network.act(*first, now["states"], state)
    with pytest.raises(InputError, match=r"timesteps: expected 0 to 29 \(max_timesteps\), got 30 to 30"):
        network.act(now["states"], now["returns_to_go"], now["timesteps"] + 30)
