"""Actions from recorded episodes: predict each action from the return to go and the previous steps.

Rows are windows of `context` steps; returns are not discounted; the loss is the mean squared error of vectors
or the cross-entropy of choices. Chen et al. 2021 (Decision Transformer), section 3.

Deviation: returns are divided by the largest return of the training data, instead of a constant per
environment as in the paper.

Without returns the same model is behaviour cloning; learning only from the best episodes is %BC of the paper
(section 5.1). For Minari data sets, the task knows the environment of the recording.
"""

import dataclasses
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyformer.core.errors import InputError
from polyformer.core.ranges import PositiveInt, PositiveShare
from polyformer.data.episodes import ROLES, Episodes, EpisodeWindows, environment_of, is_minari
from polyformer.data.rows import Batch
from polyformer.models.architectures import TrajectoryConfig
from polyformer.models.architectures.trajectory import squared_error
from polyformer.training.tasks.base import HeldOut, Metrics, ModelLoss, Rows, Task, TaskConfig, TaskRows

Numbers = tuple[float, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActionPredictionConfig(TaskConfig):
    """Offline reinforcement learning: predict the actions of recorded episodes.

    Options of None are taken from the training episodes.
    """

    context: PositiveInt = 20  # steps per row, of three tokens each
    conditioned: bool = True  # on returns; False: behaviour cloning, with 0 instead of returns
    best_episodes: PositiveShare = 1.0  # of the training episodes, those with the largest returns
    discrete: bool | None = None  # an action is a choice, not a vector
    usual_action: Numbers | None = None  # the mean vector, or the frequency of each choice
    bounded: bool | None = None  # all actions are between -1 and 1
    state_mean: Numbers | None = None
    state_std: Numbers | None = None
    return_scale: float | None = None  # returns are divided by it
    # Returns of episodes: minimum, quartiles, maximum, used by `polyformer evaluate`; and their mean.
    asked: Numbers | None = None
    mean_return: float | None = None
    environment: str | None = None  # gymnasium id of the environment for evaluation
    environment_options: dict[str, Any] | None = None  # its keyword arguments
    environment_wrappers: tuple[str, ...] = ()  # 'module:Class' each, the innermost first

    needs: ClassVar[tuple[str, ...]] = ROLES
    kind: ClassVar[str] = "act"
    paper: ClassVar[str] = "Chen et al. 2021 (Decision Transformer)"

    def with_source_defaults(self, path: str | None) -> Self:
        """Return this with the environment of a Minari data set, unless an environment is set."""
        known = environment_of(path) if path is not None and is_minari(path) else None
        if known is None or self.environment is not None:
            return self
        name, options, wrappers = known
        return dataclasses.replace(
            self, environment=name, environment_options=options, environment_wrappers=wrappers
        )

    def resolve(self, rows: Rows) -> Self:
        """Return this with the statistics of the training episodes for all options that are None."""
        if not hasattr(rows, "__len__"):
            raise InputError("data.streaming: episodes are held in memory; set it to false")
        episodes = Episodes.of(rows)
        if episodes.discrete and episodes.actions.min() < 0:
            raise InputError(f"actions: a choice is a number from 0 on, got {episodes.actions.min()}")
        if episodes.discrete:
            usual = np.bincount(episodes.actions) / len(episodes.actions)
        else:
            usual = episodes.actions.mean(0, dtype=np.float64)
        observations, whole = episodes.observations.astype(np.float64), episodes.whole
        statistics = {
            "discrete": episodes.discrete,
            "usual_action": tuple(usual.tolist()),
            "bounded": not episodes.discrete and bool(np.abs(episodes.actions).max() <= 1),
            "state_mean": tuple(observations.mean(0).tolist()),
            "state_std": tuple((observations.std(0) + 1e-6).tolist()),  # as in the code of the paper
            "return_scale": float(np.abs(episodes.returns).max()) or 1.0,
            "asked": tuple(np.percentile(whole, [0, 25, 50, 75, 100]).tolist()),
            "mean_return": float(whole.mean()),
        }
        missing = {name: value for name, value in statistics.items() if getattr(self, name) is None}
        return dataclasses.replace(self, **missing)


class EpisodeRows(TaskRows):
    """Batches of windows of episodes, with states and returns scaled for the model."""

    def __init__(self, config: ActionPredictionConfig):
        super().__init__()
        if config.usual_action is None or config.state_mean is None or config.state_std is None:
            raise InputError("state_mean: not known before the training episodes are; call resolve(rows)")
        self.config = config
        self.state_size, self.action_size = len(config.state_mean), len(config.usual_action)
        self.mean, self.deviation = (
            np.array(numbers, np.float32) for numbers in (config.state_mean, config.state_std)
        )
        self.max_timesteps: int | None = None  # of the adapted model

    def training_batches(self, rows: Any, seed: int) -> EpisodeWindows:
        """Return windows of all episodes in random order."""
        return self._windows(best(rows, self.config.best_episodes), seed, shuffle=True)

    def held_out(self, rows: Rows) -> HeldOut:
        """Return windows of all episodes in order."""
        return HeldOut(self._windows(rows, 0, shuffle=False), {})

    def scaled_states(self, observations: np.ndarray) -> np.ndarray:
        """Return observations [N, S] normalized for the model."""
        return (observations - self.mean) / self.deviation

    def scaled_returns(self, returns: np.ndarray) -> np.ndarray:
        """Return returns [N] scaled for the model."""
        scale = np.array(self.config.return_scale if self.config.conditioned else np.inf, np.float32)
        return returns / scale

    def _windows(self, rows: Any, seed: int, shuffle: bool) -> EpisodeWindows:
        config, episodes = self.config, Episodes.of(rows)
        self._check(episodes)
        scaled = dataclasses.replace(
            episodes,
            observations=self.scaled_states(episodes.observations),
            returns=self.scaled_returns(episodes.returns),
        )
        size = max(1, config.batch_tokens // (3 * config.context))
        choices = self.action_size if config.discrete else 0
        return EpisodeWindows(scaled, config.context, size, seed, shuffle, choices)

    def _check(self, episodes: Episodes) -> None:
        """Raise `InputError` for episodes with other sizes than in training, or that are too long."""
        discrete, size = self.config.discrete, episodes.observations.shape[1]
        if size != self.state_size:
            raise InputError(
                f"observations: expected {self.state_size} numbers a step, as the training episodes have, "
                f"got {size}"
            )
        size = 1 if episodes.discrete else episodes.actions.shape[1]
        if episodes.discrete != discrete or size != (1 if discrete else self.action_size):
            raise InputError("actions: expected them as the training episodes have them, choices or vectors")
        if episodes.discrete and not 0 <= episodes.actions.min() <= episodes.actions.max() < self.action_size:
            raise InputError(
                f"actions: expected choices from 0 to {self.action_size - 1}, as the training episodes have, "
                f"got {episodes.actions.min()} to {episodes.actions.max()}"
            )
        if self.max_timesteps is not None and episodes.longest > self.max_timesteps:
            raise InputError(
                f"max_timesteps: an episode has {episodes.longest} steps, and the model's table "
                f"{self.max_timesteps}; set --model.max_timesteps {episodes.longest}, or cut the episode"
            )


@dataclasses.dataclass(frozen=True)
class TrajectoryArchitecture:
    """The model of trajectories that fits the episodes of `rows`, which may then be as long as its table."""

    rows: EpisodeRows

    def adapt(self, config: Any) -> Any:
        """Return `config`, of a trajectory model, with the sizes of states and actions."""
        if not isinstance(config, TrajectoryConfig):
            raise InputError("model: this task needs a model of trajectories, such as the preset dt-gym")
        head = dataclasses.replace(
            config.head,
            state_size=self.rows.state_size,
            action_size=self.rows.action_size,
            bounded=config.head.bounded and bool(self.rows.config.bounded),
        )
        self.rows.max_timesteps = config.max_timesteps
        return dataclasses.replace(config, head=head)


class ActionLoss(ModelLoss):
    """The mean squared error of vectors, or the cross-entropy of choices, over the steps of a batch."""

    plain = False

    def __init__(self, discrete: bool):
        self.discrete = discrete

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss over the steps of `batch`."""
        return self.of(self.actions(model, batch), batch)

    def weight(self, batch: Batch) -> int:
        """Return the number of steps without padding."""
        return int(batch["attention_mask"].sum())

    def actions(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the predicted actions [B, T, A]: vectors, or the logits of choices."""
        return model(**{name: tensor for name, tensor in batch.items() if name != "labels"}).actions

    def of(self, actions: Tensor, batch: Batch) -> Tensor:
        """Return the mean loss of predicted actions."""
        real = batch["attention_mask"].bool()
        if self.discrete:
            return F.cross_entropy(actions[real], batch["labels"][real])
        return squared_error(actions, batch["labels"].to(actions.dtype), real)


class ActionMetrics(Metrics):
    """The metrics over every step of the held-out episodes:

    loss, baseline_loss          mean squared error of vectors, or nats of choices; baseline: the usual action
    accuracy, baseline_accuracy  of choices: the fraction that is predicted correctly
    """

    sums = 5

    def __init__(self, objective: ActionLoss, usual: Numbers):
        self.objective, self.usual = objective, torch.tensor(usual, dtype=torch.float64)

    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the summed losses of the model and the usual action, the correct choices, and the steps."""
        objective = self.objective
        predicted, real = objective.actions(model, batch).double(), batch["attention_mask"].bool()
        usual, steps = self.usual.to(predicted.device), real.sum().double()
        # clamped, so that the baseline has a large instead of an infinite loss for choices absent in training
        usual = (usual.clamp_min(1e-6).log() if objective.discrete else usual).expand_as(predicted)
        losses = [objective.of(actions, batch) * steps for actions in (predicted, usual)]
        correct = [self._correct(actions, batch)[real].sum().double() for actions in (predicted, usual)]
        return torch.stack([*losses, *correct, steps])

    def values(self, totals: list[float], counts: dict[str, float]) -> dict[str, float]:
        """Return the metrics of the class; accuracies only for choices."""
        *sums, steps = totals
        names = ("loss", "baseline_loss", "accuracy", "baseline_accuracy")
        measured = names[: 4 if self.objective.discrete else 2]
        return {name: total / max(steps, 1) for name, total in zip(measured, sums)}

    def _correct(self, actions: Tensor, batch: Batch) -> Tensor:
        """Return a mask [B, T] of steps where the most probable choice was taken; all False for vectors."""
        real = batch["attention_mask"].bool()
        return actions.argmax(-1) == batch["labels"] if self.objective.discrete else torch.zeros_like(real)


class ActionPrediction(Task, config=ActionPredictionConfig):
    """Offline reinforcement learning, measured by `ActionMetrics`."""

    config: ActionPredictionConfig
    rows: EpisodeRows

    def __init__(self, config: ActionPredictionConfig, tokenizer: None = None):
        rows, objective = EpisodeRows(config), ActionLoss(bool(config.discrete))
        super().__init__(
            config,
            rows=rows,
            architecture=TrajectoryArchitecture(rows),
            objective=objective,
            metrics=ActionMetrics(objective, config.usual_action or ()),
        )


def best(rows: Rows, share: float) -> Rows:
    """Return the fraction `share` of the episodes with the largest returns, at least one episode."""
    if share == 1:
        return rows
    episodes = list(rows)
    order = sorted(range(len(episodes)), key=lambda number: -sum(episodes[number]["rewards"]))
    kept = set(order[: max(1, round(share * len(episodes)))])
    return [episode for number, episode in enumerate(episodes) if number in kept]
