"""Episodes in which a Decision Transformer acts, conditioned on target returns. Chen et al. 2021, section 3.

The return-to-go starts at the target return, and each reward is subtracted from it. Discrete actions are
sampled from the model's probabilities, as in the paper's code for Atari. Achieved returns are compared with
target returns as lines of text and as a figure.
"""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.core.measuring import new_figure, save_figure
from polyformer.core.ranges import PositiveInt, check_ranges
from polyformer.models.architectures import TrajectoryTransformer
from polyformer.models.outputs import TrajectoryState
from polyformer.training.rl.environments import SpaceSizes, make_environment, space_sizes, vector_environment
from polyformer.training.tasks.act import ActionPrediction


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """Options of a trial. The same trial of the same model has the same episodes.

    environment, options, wrappers: as in gymnasium. returns: target returns. episodes: per target return; all
    run as a batch. max_steps: limit of an episode (default: the environment's limit).
    """

    environment: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    wrappers: tuple[str, ...] = ()
    returns: tuple[float, ...]
    episodes: PositiveInt = 20
    max_steps: PositiveInt | None = None
    seed: int = 0

    def make(self) -> Any:
        """Make an environment of the trial."""
        return make_environment(self.environment, self.options, self.wrappers)

    def __post_init__(self) -> None:
        check_ranges(self)
        if not self.returns or not np.isfinite(self.returns).all():
            raise InputError(f"returns: expected finite numbers to ask for, got {list(self.returns)}")


class TrajectoryActor:
    """A model that acts in several episodes at once, step by step, with the past in a state."""

    def __init__(self, model: TrajectoryTransformer, task: ActionPrediction, seed: int):
        self.model, self.task = model, task
        self.generator = torch.Generator().manual_seed(seed)
        self.device = next(model.parameters()).device
        self.state: TrajectoryState | None = None
        self.previous: Tensor | None = None

    @torch.no_grad()
    def act(self, observations: np.ndarray, returns: np.ndarray, step: int) -> np.ndarray:
        """Return the actions of this step, choices [N] or vectors [N, A].

        observations: [N, S]. returns: returns-to-go [N].
        """
        states = self._tensor(self.task.scaled_states(observations))
        wanted = self._tensor(self.task.scaled_returns(returns))[:, None]
        steps = torch.full((len(states),), step, device=self.device)
        scores, self.state = self.model.act(
            states, wanted, steps, self.previous, self.state, self.task.config.context
        )
        if not self.task.config.discrete:
            return scores.double().cpu().numpy()
        chances = scores.double().softmax(-1).cpu()
        return torch.multinomial(chances, 1, generator=self.generator)[:, 0].numpy()

    def record_actions(self, actions: np.ndarray, going: np.ndarray) -> None:
        """Record the actions of this step; keep only the episodes that continue (`going`: booleans [N])."""
        vectors = np.eye(len(self.task.usual))[actions] if self.task.config.discrete else actions
        self.previous = self._tensor(vectors)
        if not going.all() and self.state is not None:
            rows = torch.from_numpy(np.flatnonzero(going)).to(self.device)
            self.previous, self.state = self.previous[rows], self.state.reorder(rows)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.asarray(array, np.float32)).to(self.device)


def achieved_returns(
    model: TrajectoryTransformer, task: ActionPrediction, trial: Trial
) -> dict[float, list[float]]:
    """Return the achieved returns of the episodes by target return.

    Raises `InputError` for an environment that does not match the model.
    """
    steps, goals = _steps(model, task, trial), tuple(dict.fromkeys(trial.returns))
    asked = np.repeat(np.array(goals, np.float64), trial.episodes)
    total, alive = np.zeros(len(asked)), np.arange(len(asked))
    actor = TrajectoryActor(model, task, trial.seed)
    with contextlib.closing(vector_environment(len(asked), trial.make)) as environments:
        # all target returns share the same seeds
        seeds = [trial.seed * trial.episodes + number for number in range(trial.episodes)]
        seen, _ = environments.reset(seed=seeds * len(goals))
        space = environments.single_action_space
        actions = np.zeros((len(asked), *space.shape), space.dtype)
        for step in range(steps):
            chosen = actor.act(seen[alive], asked[alive] - total[alive], step)
            if not task.config.discrete:
                chosen = np.clip(chosen, space.low, space.high)
            actions[alive] = chosen
            seen, rewards, terminated, truncated, _ = environments.step(actions)
            total[alive] += rewards[alive]
            going = ~(terminated | truncated)[alive]
            actor.record_actions(chosen, going)
            alive = alive[going]
            if not len(alive):
                break
    return dict(zip(goals, total.reshape(len(goals), trial.episodes).tolist()))


def _steps(model: TrajectoryTransformer, task: ActionPrediction, trial: Trial) -> int:
    """Return the limit of steps; raises `InputError` for other sizes than the model's or long episodes."""
    environment = trial.make()
    limit, has = environment.spec.max_episode_steps, space_sizes(environment)
    environment.close()
    reads = SpaceSizes(task.state_size, len(task.usual), not task.config.discrete)
    if has != reads:
        raise InputError(
            f"environment {trial.environment}: it has {has}, and the model was trained on {reads}; name the "
            "one where its episodes were recorded"
        )
    table = model.config.max_timesteps
    steps = min(trial.max_steps or limit or table, limit or table)
    if steps > table:
        raise InputError(
            f"environment {trial.environment}: its episodes have up to {steps} steps, and the model's table "
            f"{table}; train with --model.max_timesteps {steps}, or cut them with --max-steps {table}"
        )
    return steps


Achieved = Mapping[float, Sequence[float]]
"""The returns of the episodes by target return."""


@dataclasses.dataclass(frozen=True)
class Panel:
    """A panel of the figure: achieved returns with a band of their spread, and reference levels by name."""

    title: str
    achieved: Achieved
    levels: Mapping[str, float]


def returns_table(achieved: Achieved, mean_return: float | None) -> list[str]:
    """Return a line per target return: mean, deviation, minimum and maximum of the achieved returns."""
    lines = [f"{'asked':>10}{'achieved':>12}{'deviation':>12}{'least':>10}{'largest':>10}"]
    for asked, returns in sorted(achieved.items()):
        lines.append(
            f"{asked:>10.4g}{np.mean(returns):>12.4g}{np.std(returns):>12.3g}{min(returns):>10.4g}"
            f"{max(returns):>10.4g}"
        )
    if mean_return is not None:
        lines.append(f"mean of the training episodes: {mean_return:.4g}")
    return lines


def draw_returns(path: Path, panels: Sequence[Panel]) -> None:
    """Draw the panels to `path`; bands are one standard deviation. Raises `InputError` without matplotlib."""
    figure = new_figure(5 * len(panels), 4.2)
    for axis, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
        asked = sorted(panel.achieved)
        means = np.array([np.mean(panel.achieved[each]) for each in asked])
        spread = np.array([np.std(panel.achieved[each]) for each in asked])
        axis.plot(asked, asked, color="gray", linestyle=":", label="as asked")
        axis.plot(asked, means, marker="o", label="achieved")
        axis.fill_between(asked, means - spread, means + spread, alpha=0.2)
        for number, (name, level) in enumerate(panel.levels.items(), 1):
            axis.axhline(level, color=f"C{number}", linestyle="--", label=name)
        axis.set_title(panel.title)
        axis.set_xlabel("return asked for")
        axis.set_ylabel("return achieved")
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize="small")
    save_figure(figure, path)
