"""A policy as tensordict modules: its state is stored with the observations, and is reset with the episode.

    "observation", "is_init", ("memory", ...)  ->  trunk  ->  "hidden", ("next", "memory", ...)
    "hidden"  ->  "logits" or "loc", "scale"  ->  "action", "action_log_prob"     "hidden"  ->  "state_value"

A collector calls the modules step by step, [B, ...], with the state of each row. Training calls them on runs
of steps, [B, T, ...], with the state before the first step. In both, `is_init` marks the first step of an
episode.
"""

import dataclasses
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import Tensor, nn
from torchrl.data import Composite, Unbounded
from torchrl.envs import TensorDictPrimer, TransformedEnv
from torchrl.modules import IndependentNormal, ProbabilisticActor, ValueOperator

from polyformer.core.state import State
from polyformer.models.architectures.policy import Policy
from polyformer.training.rl.rollouts import MEMORY


class RecurrentTrunk(TensorDictModuleBase):
    """The trunk of a policy: computes the input of the heads for each step, "hidden", and the next state."""

    def __init__(self, policy: Policy):
        super().__init__()
        self.policy = policy
        self.blank = policy.new_state(1)
        self.names = [field.name for field in dataclasses.fields(self.blank)]
        reads: Any = ["observation", "is_init", *((MEMORY, name) for name in self.names)]
        writes: Any = ["hidden", *(("next", MEMORY, name) for name in self.names)]
        self.in_keys, self.out_keys = reads, writes

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Compute a step of each row [B], or runs of T steps [B, T] from the state before the first."""
        observations, starts = tensordict["observation"], tensordict["is_init"].squeeze(-1)
        if tensordict.dim() == 2:
            hidden, _ = self.policy.hidden(observations, starts, self.state_of(tensordict[:, 0]))
            return tensordict.set("hidden", hidden)
        hidden, state = self.policy.hidden(observations[:, None], starts[:, None], self.state_of(tensordict))
        for name, tensor in tensors_of(state).items():
            tensordict.set(("next", MEMORY, name), tensor)
        return tensordict.set("hidden", hidden[:, 0])

    def state_of(self, tensordict: TensorDictBase) -> State:
        """Return the policy's state that `tensordict` [B] contains."""
        return dataclasses.replace(self.blank, **{name: tensordict[MEMORY, name] for name in self.names})


def tensors_of(state: State) -> dict[str, Tensor]:
    """Return a policy's state as tensors by the names of its fields."""
    return {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}


def modules_of(policy: Policy) -> tuple[Any, Any]:
    """Return the actor and the value module; the trunk runs once, as the value module reads "hidden"."""
    keys: Any
    if policy.config.continuous:
        keys, kind, heads = ["loc", "scale"], IndependentNormal, _Normal(policy)
    else:
        keys, kind, heads = ["logits"], torch.distributions.Categorical, policy.actions
    reading: list[Any] = [RecurrentTrunk(policy), TensorDictModule(heads, in_keys=["hidden"], out_keys=keys)]
    actor = ProbabilisticActor(
        TensorDictSequential(*reading), in_keys=keys, distribution_class=kind, return_log_prob=True
    )
    return actor, ValueOperator(policy.values, in_keys=["hidden"])


class _Normal(nn.Module):
    """Means and standard deviations of vectors of actions, [..., A] each."""

    def __init__(self, policy: Policy):
        super().__init__()
        self.policy = policy

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        means = self.policy.actions(hidden)
        return means, self.policy.log_deviations.exp().expand_as(means)


def with_recurrent_state(env: TransformedEnv, policy: Policy) -> TransformedEnv:
    """Return `env` [B] with resets that also provide the initial state of the policy."""
    rows = env.batch_size
    specs = {
        name: Unbounded(torch.Size((*rows, *tensor.shape[1:])), dtype=tensor.dtype, device=env.device)
        for name, tensor in tensors_of(policy.new_state(1)).items()
    }
    if not specs:
        return env
    memory = Composite({MEMORY: Composite(specs, shape=rows)}, shape=rows)
    return env.append_transform(TensorDictPrimer(memory))
