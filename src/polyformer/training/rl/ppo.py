"""Proximal policy optimisation: policies act in batches of environments, and training uses their steps.

The policy consists of tensordict modules; its state is stored with the observations, and is reset with the
episode:

    "observation", "is_init", ("memory", ...)  ->  trunk  ->  "hidden", ("next", "memory", ...)
    "hidden"  ->  "logits" or "loc", "scale"  ->  "action", "action_log_prob"     "hidden"  ->  "state_value"

A collector calls the modules step by step, [B, ...], with the state of each row. Training calls them on runs
of steps, [B, T, ...], with the state before the first step. In both, `is_init` marks the first step of an
episode.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import Tensor, nn
from torchrl.collectors import Collector
from torchrl.data import Composite, Unbounded
from torchrl.envs import DTypeCastTransform, GymWrapper, InitTracker, TensorDictPrimer, TransformedEnv
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import IndependentNormal, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from polyformer.core.state import State
from polyformer.models.architectures.policy import Policy
from polyformer.training.rl import (
    MEMORY,
    Rollout,
    make_environment,
    scale_actions,
    tensors_of,
    vector_environment,
)


class RecurrentTrunk(TensorDictModuleBase):
    """The trunk of a policy: computes the input of the heads for each step, "hidden", and the next state."""

    def __init__(self, policy: Policy):
        super().__init__()
        self.policy = policy
        self.blank = policy.new_state(1)
        self.names = list(tensors_of(self.blank))
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


class Actors:
    """`rows` environments in which `policy` acts, as a batch in this process.

    Each is reset when its episode ends, which also provides the initial state of the policy. Vectors of
    actions are scaled to the bounds -1 and 1. Every call starts new episodes from its seed, so that the
    result is a function of the seed, the weights and torch's random state.
    """

    def __init__(
        self,
        policy: Policy,
        environment: str,
        wrappers: Sequence[str],
        options: dict[str, Any],
        rows: int,
        steps: int,
    ):
        device = next(policy.parameters()).device
        vector = vector_environment(
            rows, lambda: scale_actions(make_environment(environment, options, wrappers)), resets=False
        )
        wrapped = GymWrapper(vector, categorical_action_encoding=True, device=device)
        self.env = TransformedEnv(wrapped, InitTracker())
        dtype = self.env.observation_spec["observation"].dtype
        self.env.append_transform(DTypeCastTransform(dtype, torch.float32, in_keys=["observation"]))
        specs = {
            name: Unbounded(torch.Size((rows, *tensor.shape[1:])), dtype=tensor.dtype, device=device)
            for name, tensor in tensors_of(policy.new_state(1)).items()
        }
        if specs:
            memory = Composite({MEMORY: Composite(specs, shape=(rows,))}, shape=(rows,))
            self.env.append_transform(TensorDictPrimer(memory))
        self.actor = TensorDictSequential(*modules_of(policy))
        self.collector = Collector(
            self.env, self.actor, frames_per_batch=rows * steps, reset_at_each_iter=True, return_same_td=True
        )

    @torch.no_grad()
    def act(self, seed: int) -> TensorDictBase:
        """Return observations and actions of all steps [T] of every row [N], in the collector's format."""
        self.collector.set_seed(seed, static_seed=True)
        return next(self.collector.iterator())


@torch.no_grad()
def episodes(actors: Actors, seed: int, most: int) -> tuple[Tensor, Tensor]:
    """Return the sum of rewards and the length of an episode per row [N], with sampled actions.

    Episodes end after at most `most` steps.
    """
    actors.env.set_seed(seed)
    now = actors.env.reset()
    going = torch.ones(now.shape, dtype=torch.bool, device=now["done"].device)
    returns, lengths = torch.zeros_like(going, dtype=torch.float), torch.zeros_like(going, dtype=torch.long)
    with set_exploration_type(ExplorationType.RANDOM):
        for _ in range(most):
            stepped, now = actors.env.step_and_maybe_reset(actors.actor(now))
            returns += stepped["next", "reward"].squeeze(-1) * going
            lengths += going
            going = going & ~stepped["next", "done"].squeeze(-1)
            if not going.any():
                break
    return returns, lengths


def objective(policy: Policy, clip: float, entropy: float, value: float) -> ClipPPOLoss:
    """Return the clipped PPO loss with its coefficients; actions and values share a pass of the trunk."""
    actor, critic = modules_of(policy)
    return ClipPPOLoss(
        actor,
        critic,
        clip_epsilon=clip,
        entropy_coeff=entropy,
        critic_coeff=value,
        loss_critic_type="l2",
        normalize_advantage=True,
        functional=False,
    )


@torch.no_grad()
def rollout(policy: Policy, steps: TensorDictBase, gamma: float, lambda_: float, segment: int) -> Rollout:
    """Return the training data of `steps` [N, T], cut into runs of `segment` steps.

    The advantages are generalized advantage estimates (Schulman et al. 2016) with the policy's own values.
    """
    remembering = RecurrentTrunk(policy)
    values = steps["state_value"]
    following = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], 1)
    cut = steps["next", "truncated"].squeeze(-1).clone()
    cut[:, -1] = True  # the next value is missing where an episode was truncated and after the last step
    after: Any = steps["next"][cut]
    hidden, _ = policy.hidden(
        after["observation"][:, None],
        torch.zeros(len(after), 1, dtype=torch.bool, device=values.device),
        remembering.state_of(after),
    )
    following[cut] = policy.values(hidden)[:, 0]
    steps["next", "state_value"] = following
    GAE(gamma=gamma, lmbda=lambda_, value_network=None)(steps)
    runs: Any = steps.reshape(-1, segment)
    memory = remembering.state_of(runs[:, 0])
    return Rollout(
        runs["observation"],
        runs["is_init"].squeeze(-1),
        runs["action"],
        runs["action_log_prob"],
        runs["advantage"].squeeze(-1),
        runs["value_target"].squeeze(-1),
        memory.map(torch.clone),
    )
