"""Reinforcement learning in an environment: a policy is trained on its own actions by PPO.

An epoch is an iteration: `rows` parallel environments run `steps` steps each from new episodes, then the
policy is updated on all of them `passes` times, with `minibatches` per pass, each of them a training step.
The objective is clipped (Schulman et al. 2017) with generalized advantage estimation (Schulman et al. 2016);
objective, advantages, batched environments and collector are from TorchRL. The collected steps are the state
that training carries between updates and saves in checkpoints, so that a run can resume within an iteration.

Deviation: an iteration truncates unfinished episodes, bootstrapped by the value of their last state, and the
next iteration starts new episodes, so that it is a function of seed and weights; set `steps` to the length of
an episode.
"""

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from polyformer.core.errors import InputError
from polyformer.core.modules import evaluating
from polyformer.core.ranges import NonNegativeFloat, PositiveInt, UnitFloat
from polyformer.core.state import State
from polyformer.data import Splits
from polyformer.data.rows import Batch, NumberedBatches
from polyformer.models.architectures import Policy, PolicyConfig
from polyformer.training.rl import Rollout
from polyformer.training.tasks.base import HeldOut, Metrics, ModelLoss, Rows, Task, TaskConfig, TaskRows

if TYPE_CHECKING:
    from polyformer.training.rl.ppo import Actors

HELD_OUT = 2**31 - 1
"""Replaces the iteration number in the seeds of evaluation episodes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AgentConfig(TaskConfig):
    """Reinforcement learning: act in a gymnasium environment, trained by PPO.

    `wrappers`: 'module:Class' each, the innermost first.
    """

    environment: str = "CartPole-v1"  # its id, or 'module:id' if a module registers it
    wrappers: tuple[str, ...] = ()
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # for the environment
    rows: PositiveInt = 32  # parallel environments
    steps: PositiveInt = 128  # steps per environment and iteration
    segment: int | None = None  # steps per training segment, after their memory; None: all
    passes: PositiveInt = 4
    minibatches: PositiveInt = 4
    discount: UnitFloat = 0.99
    trace: UnitFloat = 0.95  # lambda of the advantages
    clip: NonNegativeFloat = 0.2  # clipping range of the probability ratio
    entropy: NonNegativeFloat = 0.01  # weight of the entropy of actions
    value: NonNegativeFloat = 0.5  # weight of the squared error of values
    episodes: PositiveInt = 64  # evaluation episodes
    episode_steps: PositiveInt = 1000  # maximum steps of an evaluation episode

    kind: ClassVar[str] = "agent"
    paper: ClassVar[str] = "Schulman et al. 2017 (PPO)"

    def __post_init__(self) -> None:
        if self.batch_tokens != TaskConfig.batch_tokens:
            raise InputError("batch_tokens: an agent reads no tokens; set rows, steps and minibatches")
        if self.steps % self.run_length or self.runs % self.minibatches:
            raise InputError(
                f"segment: {self.rows} rows of {self.steps} steps do not cut into segments of "
                f"{self.run_length} and those into {self.minibatches} minibatches; change one of them"
            )

    @property
    def run_length(self) -> int:
        """Return the number of steps in a training segment."""
        return self.segment or self.steps

    @property
    def runs(self) -> int:
        """Return the number of segments in an iteration."""
        return self.rows * self.steps // self.run_length

    @property
    def own_data(self) -> Splits:
        """Return empty data, because nothing is read."""
        empty: Any = ()
        return Splits(empty, empty, None)


class Iterations(TaskRows):
    """Batches that are the numbers of updates and of evaluation batches; a seed decides the episodes."""

    continues = True  # the collected steps are carried between updates

    def __init__(self, config: AgentConfig):
        super().__init__()
        self.config, self.seed = config, 0

    def training_batches(self, rows: Any, seed: int) -> NumberedBatches:
        """Return the updates of an iteration by their numbers."""
        self.seed = seed
        return NumberedBatches(self.config.passes * self.config.minibatches)

    def held_out(self, rows: Rows) -> HeldOut:
        """Return episodes in batches of `rows`."""
        return HeldOut(NumberedBatches(-(-self.config.episodes // self.config.rows)), {})

    def seed_of(self, epoch: int, number: int) -> int:
        """Return the first of the consecutive seeds of a batch of environments."""
        return int(np.random.default_rng([self.seed, epoch, number]).integers(2**30))


@dataclasses.dataclass(frozen=True)
class PolicyArchitecture:
    """The policy for the observations and actions of the environment."""

    config: AgentConfig

    def adapt(self, config: Any) -> PolicyConfig:
        """Return `config`, of a policy, with the sizes of the environment."""
        from polyformer.training.rl import check_installed, make_environment, space_sizes

        if not isinstance(config, PolicyConfig):
            raise InputError("model: this task needs a policy, such as the preset gtrxl")
        check_installed("gymnasium", "torchrl")
        environment = make_environment(self.config.environment, self.config.options, self.config.wrappers)
        sizes = space_sizes(environment)
        environment.close()
        return dataclasses.replace(
            config,
            observation_size=sizes.observation,
            num_actions=sizes.action,
            continuous=sizes.continuous,
        )


class ProximalPolicy(ModelLoss):
    """The clipped objective of the actions that the policy itself took."""

    plain = False

    def __init__(self, rows: Iterations):
        self.config, self.rows = rows.config, rows
        self._parts: tuple[Policy, Actors, nn.Module] | None = None

    def weight(self, batch: Batch) -> int:
        """Return the number of steps in a minibatch."""
        return self.config.rows * self.config.steps // self.config.minibatches

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of the first update of an iteration."""
        return self.loss_after(model, batch, None)[0]

    def loss_after(self, model: nn.Module, batch: Batch, state: State | None) -> tuple[Tensor, State | None]:
        """Return the loss of an update, and the steps collected in the first update of the iteration."""
        from polyformer.training.rl.ppo import rollout

        policy, actors, objective = self.parts(model)
        config = self.config
        epoch, number = batch["number"][0].tolist()
        if number == 0 or state is None:
            with evaluating(policy):
                acted = actors.act(self.rows.seed_of(epoch, 0))
                state = rollout(policy, acted, config.discount, config.trace, config.run_length)
        done, part = divmod(number, config.minibatches)
        order = np.random.default_rng([self.rows.seed, epoch, done]).permutation(config.runs)
        chosen = torch.from_numpy(np.array_split(order, config.minibatches)[part]).to(batch["number"].device)
        assert isinstance(state, Rollout)
        losses = objective(state.reorder(chosen).tensordict())
        return losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"], state

    def parts(self, model: Any) -> "tuple[Policy, Actors, nn.Module]":
        """Return the policy in `model`, its environments and its objective, which are created once."""
        from polyformer.training.rl.ppo import Actors, objective

        policy = getattr(model, "_orig_mod", model)
        if self._parts is None or self._parts[0] is not policy:
            config = self.config
            actors = Actors(
                policy, config.environment, config.wrappers, config.options, config.rows, config.steps
            )
            self._parts = policy, actors, objective(policy, config.clip, config.entropy, config.value)
        return self._parts


class EpisodeReturns(Metrics):
    """The metrics over the first `episodes` evaluation episodes, with actions sampled as in training:

    return       the mean sum of rewards
    length       the mean number of steps
    """

    best = "return"
    direction = "max"
    sums = 3

    def __init__(self, objective: ProximalPolicy):
        self.config, self.objective, self.rows = objective.config, objective, objective.rows

    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the sums of returns and of lengths, and the number of counted episodes."""
        from polyformer.training.rl.ppo import episodes

        _, actors, _ = self.objective.parts(model)
        number = int(batch["number"][0, 1])
        count = min(self.config.rows, self.config.episodes - number * self.config.rows)
        seed = self.rows.seed_of(HELD_OUT, number)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            returns, lengths = episodes(actors, seed, self.config.episode_steps)
        sums = [returns[:count].sum(), lengths[:count].sum(), torch.tensor(count)]
        return torch.stack([value.double() for value in sums]).to(batch["number"].device)

    def values(self, totals: list[float], counts: dict[str, float]) -> dict[str, float]:
        """Return the metrics of the class."""
        returns, lengths, count = totals
        return {"return": returns / count, "length": lengths / count}


class Agent(Task, config=AgentConfig):
    """PPO, measured by `EpisodeReturns`."""

    config: AgentConfig
    needs_float32 = True  # the probabilities of old and new actions are compared, and states are stored

    def __init__(self, config: AgentConfig, tokenizer: None = None):
        rows = Iterations(config)
        objective = ProximalPolicy(rows)
        super().__init__(
            config,
            rows=rows,
            architecture=PolicyArchitecture(config),
            objective=objective,
            metrics=EpisodeReturns(objective),
        )
