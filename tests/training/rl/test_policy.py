"""Policies: acting step by step is one pass over a run, and no episode sees another, row by row."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

import polyformer.models.transformers
from polyformer import InputError
from polyformer.core.state import State
from polyformer.data import TokenizerConfig, build_tokenizer
from polyformer.models.architectures import (
    Policy,
    PolicyConfig,
    TrajectoryConfig,
    load_pretrained,
    read_config,
)
from polyformer.models.architectures.weights import with_weights
from polyformer.models.checkpoints import convert
from polyformer.models.presets import MODELS, model_config
from polyformer.training.tasks import LanguageModellingConfig

POLICIES = "gtrxl", "policy-transformer-xl", "policy-lstm", "policy-feedforward"
ROWS, STEPS, SIZE = 3, 13, 5


def tiny(name: str) -> Policy:
    """In float64, its choices far from alike; a memory shorter than a run."""
    sizes = {"hidden_size": 8, "observation_size": SIZE}
    if name in POLICIES[:2]:
        sizes |= {"memory_length": 4, "intermediate_size": 16, "num_hidden_layers": 2}
    config = model_config(name, sizes)
    assert isinstance(config, PolicyConfig)
    torch.manual_seed(0)
    policy = Policy(config).double()
    with torch.no_grad():
        policy.actions.weight.mul_(100)
    return policy


@pytest.fixture
def observations() -> Tensor:
    return torch.randn(ROWS, STEPS, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def starts() -> Tensor:
    """Episodes that begin at other steps in each row, one with the second run."""
    starts = torch.zeros(ROWS, STEPS, dtype=torch.bool)
    starts[0, 0] = starts[0, 7] = starts[1, 2] = starts[1, 3] = True
    return starts


def by_runs(policy: Policy, observations: Tensor, starts: Tensor, length: int) -> tuple[Tensor, State]:
    """Logits of all steps, read in runs of `length`, and the last state."""
    state, logits = None, []
    for first in range(0, STEPS, length):
        run = slice(first, first + length)
        output = policy(observations[:, run], starts[:, run], state)
        state = output.state
        logits.append(output.logits)
    assert state is not None
    return torch.cat(logits, 1), state


@pytest.mark.parametrize("length", [1, 3, 7])
@pytest.mark.parametrize("name", POLICIES)
def test_steps_taken_apart_are_one_pass(name: str, length: int, observations: Tensor, starts: Tensor):
    policy = tiny(name)
    whole = policy(observations, starts)
    logits, state = by_runs(policy, observations, starts, length)
    torch.testing.assert_close(logits, whole.logits, atol=1e-10, rtol=0)
    for field in dataclasses.fields(state):
        mine, other = getattr(state, field.name), getattr(whole.state, field.name)
        torch.testing.assert_close(mine, other, atol=1e-10, rtol=0)


@pytest.mark.parametrize("length", [1, 3, STEPS])
@pytest.mark.parametrize("name", POLICIES)
def test_an_episode_is_what_it_is_alone(name: str, length: int, observations: Tensor, starts: Tensor):
    """Also where what another episode left in the memory is no number."""
    policy = tiny(name)
    logits, _ = by_runs(policy, observations, starts, length)
    episodes = [(0, 0, 7), (0, 7, STEPS), (1, 0, 2), (1, 2, 3), (1, 3, STEPS), (2, 0, STEPS)]
    for row, first, end in episodes:
        alone = policy(observations[row : row + 1, first:end]).logits[0]
        torch.testing.assert_close(logits[row, first:end], alone, atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", POLICIES[:3])
def test_observations_count_until_the_episode_ends(name: str, observations: Tensor):
    policy = tiny(name)
    other = observations.clone()
    other[:, 0] += 1
    before, after = policy(observations).state, policy(other).state
    last = observations[:, -1:]
    none, new = torch.zeros(ROWS, 1, dtype=torch.bool), torch.ones(ROWS, 1, dtype=torch.bool)
    # two layers with a memory of four steps reach eight back: only an LSTM knows the first of 13 steps
    reach = name == "policy-lstm"
    assert torch.equal(policy(last, none, before).logits, policy(last, none, after).logits) is not reach
    near = policy(observations[:, :6]).state, policy(other[:, :6]).state
    assert not torch.equal(policy(last, none, near[0]).logits, policy(last, none, near[1]).logits)
    assert torch.equal(policy(last, new, near[0]).logits, policy(last, new, near[1]).logits)


def test_gradients_reach_the_memory_s_projections_and_not_the_steps_before(observations: Tensor):
    policy = tiny("gtrxl")
    first = observations[:, :4].clone().requires_grad_()
    output = policy(observations[:, 4:], state=policy(first).state)
    output.values.sum().backward()
    assert first.grad is None
    assert all(parameter.grad is not None for parameter in policy.trunk.parameters())


def test_attention_over_the_memory_sums_to_one_over_the_episode(observations: Tensor):
    policy = tiny("gtrxl")
    state = policy(observations[:, :2]).state
    output = policy(observations[:, 2:3], state=state, output_attentions=True)
    assert output.attentions is not None
    weights = output.attentions[0]
    assert weights.shape == (ROWS, 2, 1, 4 + 1)
    assert not weights[..., :2].any()  # two steps are remembered, two slots hold nothing
    torch.testing.assert_close(weights.sum(-1), torch.ones(ROWS, 2, 1, dtype=torch.float64))


def test_a_policy_is_saved_and_known_by_its_file(tmp_path: Path, observations: Tensor):
    policy = tiny("gtrxl")
    policy.save_pretrained(tmp_path)
    assert read_config(tmp_path) == policy.config
    loaded = load_pretrained(tmp_path)
    assert isinstance(loaded, Policy)
    again = loaded.double()(observations).logits
    torch.testing.assert_close(again, policy(observations).logits, atol=1e-4, rtol=1e-4)
    assert isinstance(MODELS["dt-tiny"](), TrajectoryConfig)


def test_a_policy_is_refused_where_a_model_of_texts_is_expected():
    policy = tiny("gtrxl")
    task = LanguageModellingConfig().build(build_tokenizer(TokenizerConfig(algorithm="bytes"), []))
    refusals = {
        "transformers has no class for a Policy": lambda: polyformer.models.transformers.wrap(policy),
        "expected a model of texts, got a Policy": lambda: convert(policy, attention="lsh"),
        "a Policy does not support int8": lambda: with_weights(policy, "int8"),
        "got a model that reads no text": lambda: task.adapt(policy.config),
    }
    for message, call in refusals.items():
        with pytest.raises(InputError, match=message):
            call()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(2, 3),), "observations: expected numbers"),
        ((torch.zeros(2, 3, SIZE + 1),), rf"\[batch, steps, {SIZE}\], got torch.float32 \[2, 3, 6\]"),
        ((torch.zeros(2, 3, SIZE, dtype=torch.long),), "got torch.int64"),
        ((torch.zeros(2, 3, SIZE), torch.zeros(2, 4, dtype=torch.bool)), r"starts: .*\[2, 3\], got"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(arguments: tuple[Tensor, ...], message: str):
    with pytest.raises(InputError, match=message):
        tiny("policy-feedforward").float()(*arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_actions": 0}, "num_actions: expected 1 or more"),
        ({"memory_length": 0}, "memory_length: expected 1 or more"),
        ({"attention": "lsh"}, "requires softmax attention"),
        ({"position": "learned"}, "memory: "),
    ],
)
def test_policies_without_actions_memory_or_softmax_are_refused(changes: dict[str, object], message: str):
    with pytest.raises(InputError, match=message):
        Policy(model_config("gtrxl", changes))  # type: ignore[arg-type]


def test_a_feed_forward_that_keeps_tokens_of_its_own_is_refused():
    with pytest.raises(InputError, match=r"feedforward.*state of its own"):
        model_config("gtrxl", {"feedforward": "separable_convolution"})
