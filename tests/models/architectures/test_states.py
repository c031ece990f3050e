"""A state belongs to the rows, the parts and the source that it has read: others are refused by one check."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from polyformer import InputError, create_model
from polyformer.core.state import load_state, save_state
from polyformer.models.architectures.policy import Policy, PolicyConfig
from polyformer.models.architectures.trajectory import TrajectoryTransformer

IDS = torch.arange(12).reshape(2, 6) + 5
KINDS = "softmax", "linear", "performer", "retention", "gla", "ssd", "delta", "lsh", "memory_compressed"


def decoder(**options: Any) -> Any:
    torch.manual_seed(0)
    return create_model("decoder-tiny", **options).eval()


@pytest.mark.parametrize("attention", KINDS)
def test_a_state_of_other_rows_or_layers_is_refused(attention: str):
    model = decoder(attention=attention)
    state = model(IDS, use_cache=True).state
    with pytest.raises(InputError, match="state: expected 1 rows, as the ids have, got a state of 2"):
        model(IDS[:1, :3], state=state)
    deeper = decoder(attention=attention, num_hidden_layers=3)(IDS, use_cache=True).state
    with pytest.raises(InputError, match=r"expected a state of a model with '2 layers', got .*'3 layers'"):
        model(IDS, state=deeper)
    model(IDS[:1, :3], state=state.reorder(torch.tensor([1])))  # as the message says


@pytest.mark.parametrize(
    "options",
    [
        {"attention": "retention"},
        {"num_key_value_heads": 1},
        {"num_attention_heads": 2},
        {"hidden_size": 64},
        {"position": "alibi"},
        {"position": "rope(base=500)"},
        {"memory": "recurrent"},
        {"attention": "Window(4, 0)"},
        {"feedforward": "separable_convolution"},
    ],
    ids=str,
)
def test_a_state_of_a_model_with_other_parts_is_refused(options: dict[str, Any]):
    model, other = decoder(position="rope"), decoder(**{"position": "rope", **options})
    for reader, writer in ((model, other), (other, model)):
        state = writer(IDS, use_cache=True).state
        with pytest.raises(InputError, match="state: expected a state of a model with"):
            reader(IDS, state=state)
        writer(IDS, state=state)


def test_models_that_differ_only_in_training_share_states():
    model, other = decoder(dropout=0.0), decoder(dropout=0.5)
    state = model(IDS, use_cache=True).state
    assert torch.equal(model(IDS, state=state).logits, other(IDS, state=state).logits)


def test_what_is_no_state_is_refused():
    for model, inputs in (
        (decoder(), {}),
        (create_model("transformer-tiny"), {"decoder_input_ids": IDS}),
    ):
        for value in (5, 0, "state", (), torch.zeros(2)):
            with pytest.raises(InputError, match="state: expected the state of an earlier output, got"):
                model(IDS, **inputs, state=value)


def test_a_saved_state_knows_its_model_and_an_earlier_file_its_layers(tmp_path: Path):
    model, deeper = decoder(), decoder(num_hidden_layers=3)
    state = model(IDS, use_cache=True).state
    for name, saved in (("today", state), ("earlier", dataclasses.replace(state, owner=None))):
        save_state(saved, tmp_path / name)
        read = load_state(tmp_path / name)
        assert torch.equal(model(IDS, state=read).logits, model(IDS, state=state).logits)
        with pytest.raises(InputError, match="'3 layers', got one of a model with '2 layers'"):
            deeper(IDS, state=read)


def test_the_state_of_a_source_is_not_used_with_another():
    model = create_model("transformer-tiny").eval()
    target, state = IDS[:, :2], model.encode(IDS)
    first = model(IDS, decoder_input_ids=target, state=state).logits
    assert torch.equal(first, model(decoder_input_ids=target, state=state).logits)
    for other in (IDS + 1, IDS[:, :4], IDS[:1]):
        with pytest.raises(InputError, match="input_ids: expected the source that the state has read"):
            model(other, decoder_input_ids=target, state=state)
    with pytest.raises(InputError, match="expected 1 rows, as the ids have, got a state of 2"):
        model(decoder_input_ids=target[:1], state=state)
    both = state.reorder(torch.tensor([1, 1, 0]))
    with pytest.raises(InputError, match="input_ids: expected the source"):
        model(IDS[[0, 0, 1]], decoder_input_ids=target[[1, 1, 0]], state=both)
    assert torch.equal(model(decoder_input_ids=target[[1, 1, 0]], state=both).logits[2], first[0])
    with pytest.raises(InputError, match="state: expected a state of a model with"):
        decoder()(IDS, state=model(IDS, decoder_input_ids=target, use_cache=True).state)


def test_the_state_of_an_agent_is_not_used_for_others():
    agent = TrajectoryTransformer(TrajectoryTransformer.config_type()).eval()
    sizes = agent.config.head

    def step(rows: int, number: int = 1) -> dict[str, torch.Tensor]:
        times = torch.full((rows,), number)
        return {
            "states": torch.zeros(rows, sizes.state_size),
            "returns_to_go": torch.ones(rows, 1),
            "timesteps": times,
        }

    action, state = agent.act(**step(2, 0))
    agent.act(**step(2), previous=action, state=state)
    with pytest.raises(InputError, match="expected 1 rows"):
        agent.act(**step(1), previous=action[:1], state=state)
    with pytest.raises(InputError, match="timesteps: expected 1 to"):
        agent.act(**step(2, 0), previous=action, state=state)
    with pytest.raises(InputError, match="state: expected the state of an earlier output, got 5"):
        agent.act(**step(2), previous=action, state=5)


@pytest.mark.parametrize("trunk", ["decoder", "lstm", "feedforward"])
def test_the_state_of_a_policy_is_not_used_for_other_rows(trunk: str):
    policy = Policy(PolicyConfig(observation_size=3, trunk=trunk)).eval()
    state = policy(torch.zeros(2, 4, 3)).state
    policy(torch.zeros(2, 1, 3), state=state)
    with pytest.raises(InputError, match="state: expected"):
        policy(torch.zeros(2, 1, 3), state=5)
    if trunk != "feedforward":
        with pytest.raises(InputError, match=r"state: expected \w+ of the shape \(1, "):
            policy(torch.zeros(1, 1, 3), state=state)
