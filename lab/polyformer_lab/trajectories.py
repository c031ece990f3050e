"""Decision Transformers with other losses and inputs, and an environment with sparse rewards.

A recipe imports this module.
"""

import dataclasses
from typing import Any, ClassVar, SupportsFloat

import gymnasium
import numpy as np
from gymnasium.utils import RecordConstructorArgs
from torch import Tensor, nn

from polyformer.core.ranges import NonNegativeFloat
from polyformer.data.rows import Batch
from polyformer.models.architectures.trajectory import squared_error
from polyformer.training.tasks import Task
from polyformer.training.tasks.act import (
    ActionLoss,
    ActionMetrics,
    ActionPrediction,
    ActionPredictionConfig,
    EpisodeRows,
    TrajectoryArchitecture,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariedActionConfig(ActionPredictionConfig):
    """Offline reinforcement learning with losses of states and returns, and with hidden observations."""

    state_weight: NonNegativeFloat = 0.0  # of the mean squared error of the next normalized state
    return_weight: NonNegativeFloat = 0.0  # of the mean squared error of the next scaled return-to-go
    hidden: tuple[int, ...] = ()  # places in an observation that are always 0, in training and in acting

    kind: ClassVar[str] = "act_varied"


class VariedRows(EpisodeRows):
    """Windows of episodes with hidden observations."""

    config: VariedActionConfig

    def scaled_states(self, observations: np.ndarray) -> np.ndarray:
        """Return observations [..., S] normalized for the model, with zeros in the hidden places."""
        states = super().scaled_states(observations)
        states[..., list(self.config.hidden)] = 0
        return states


class VariedLoss(ActionLoss):
    """The loss of actions plus the weighted losses of the next states and returns."""

    def __init__(self, config: VariedActionConfig):
        super().__init__(bool(config.discrete))
        self.config = config

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the sum of the losses."""
        output: Any = model(**{name: tensor for name, tensor in batch.items() if name != "labels"})
        loss, real = self.of(output.actions, batch), batch["attention_mask"].bool()
        for weight, predicted, actual in (
            (self.config.state_weight, output.states, batch["states"]),
            (self.config.return_weight, output.returns, batch["returns_to_go"]),
        ):
            if weight:
                loss = loss + weight * squared_error(predicted[:, :-1], actual[:, 1:], real[:, :-1])
        return loss


class VariedActions(ActionPrediction, config=VariedActionConfig):
    """Action prediction with the options of `VariedActionConfig`."""

    def __init__(self, config: VariedActionConfig, tokenizer: None = None):
        rows, objective = VariedRows(config), VariedLoss(config)
        Task.__init__(
            self,
            config,
            rows=rows,
            architecture=TrajectoryArchitecture(rows),
            objective=objective,
            metrics=ActionMetrics(objective, config.usual_action or ()),
        )


class DelayedRewards(gymnasium.Wrapper[Any, Any, Any, Any], RecordConstructorArgs):
    """An environment that gives the sum of all rewards at the last step of an episode, and 0 before."""

    def __init__(self, env: gymnasium.Env[Any, Any]):
        RecordConstructorArgs.__init__(self)
        super().__init__(env)
        self.total = 0.0

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        self.total = 0.0
        return super().reset(**options)

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Take a step."""
        seen, reward, terminated, truncated, facts = super().step(action)
        self.total += float(reward)
        return seen, self.total if terminated or truncated else 0.0, terminated, truncated, facts
