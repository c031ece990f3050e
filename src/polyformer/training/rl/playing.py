"""Trained models that play: an episode of a policy with a picture of its attention, or a trial.

A policy plays an observation per call. An episode keeps the attention weights of each step to earlier steps,
and is drawn as a figure or a GIF.

In a trial a Decision Transformer acts, conditioned on target returns: Chen et al. 2021, section 3. The
return-to-go starts at the target return, and each reward is subtracted from it. Discrete actions are sampled
from the model's probabilities, as in the paper's code for Atari. Achieved returns are compared with target
returns as lines of text and as a figure.
"""

import contextlib
import dataclasses
import io
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.core.files import write_output
from polyformer.core.imports import needs_extra
from polyformer.core.measuring import new_figure, save_figure
from polyformer.core.ranges import PositiveInt, check_ranges
from polyformer.models.architectures import TrajectoryTransformer
from polyformer.models.architectures.policy import Policy
from polyformer.models.outputs import TrajectoryState
from polyformer.training.rl import (
    SpaceSizes,
    make_environment,
    rescale_action,
    space_sizes,
    vector_environment,
)
from polyformer.training.rl.recording import Source
from polyformer.training.tasks.act import ActionPrediction


class PolicyPlayer:
    """A function from the observations [S] of one episode, in order, to actions in `space`.

    Actions are sampled with `generator`, or the most probable without a generator. attentions: of the last
    step, [H, M + 1] per layer, if `attends` is set.
    """

    def __init__(
        self, policy: Policy, space: Any, generator: torch.Generator | None = None, attends: bool = False
    ):
        self.policy, self.space, self.generator, self.attends = policy, space, generator, attends
        self.state = None
        self.attentions: tuple[Tensor, ...] = ()

    @torch.no_grad()
    def __call__(self, seen: np.ndarray) -> Any:
        """Return a choice, or a vector within its bounds."""
        device = next(self.policy.parameters()).device
        observation = torch.as_tensor(seen, dtype=torch.float32, device=device)[None, None]
        output = self.policy(observation, state=self.state, output_attentions=self.attends)
        self.state = output.state
        self.attentions = tuple(layer[0, :, 0] for layer in output.attentions or ())
        logits = output.logits[0, 0].float().cpu()
        if not self.policy.config.continuous:
            drawn = self.generator is not None
            return int(
                torch.multinomial(logits.softmax(-1), 1, generator=self.generator)
                if drawn
                else logits.argmax()
            )
        if self.generator is not None:
            noise = torch.randn(logits.shape, generator=self.generator)
            logits = logits + self.policy.log_deviations.exp().cpu() * noise
        return rescale_action(self.space, logits.numpy())


def source_of(policy: Policy, environment: Any) -> Source:
    """Return `policy` as a source of episodes with sampled actions; raises `InputError` if sizes differ."""
    config, has = policy.config, space_sizes(environment)
    reads = SpaceSizes(config.observation_size, config.num_actions, config.continuous)
    if has != reads:
        raise InputError(
            f"policies: a policy was trained on {reads}, and the environment has {has}; record it "
            "where it was trained, with the same --wrappers"
        )

    def source(generator: np.random.Generator) -> PolicyPlayer:
        seeded = torch.Generator().manual_seed(int(generator.integers(2**31)))
        return PolicyPlayer(policy, environment.action_space, seeded)

    return source


COLUMNS = 4
"""Layers per row of the figure."""


@dataclasses.dataclass(frozen=True)
class Episode:
    """A played episode of T steps.

    weights: [L, H, T, 1 + M], of the steps 0 to M ago. rewards: of each step. observations: [T, S]. pictures:
    rendered frames [height, width, 3] in bytes; empty if the environment does not render.
    """

    weights: Tensor
    rewards: list[float]
    observations: np.ndarray
    pictures: list[np.ndarray]


def play_episode(policy: Policy, environment: Any, seed: int, most: int) -> Episode:
    """Play an episode with the most probable actions, of at most `most` steps.

    Raises `InputError` for a policy without attention.
    """
    playing = PolicyPlayer(policy, environment.action_space, attends=True)
    weights, rewards, observations = list[Tensor](), list[float](), list[np.ndarray]()
    pictures = list[np.ndarray | None]()
    seen, _ = environment.reset(seed=seed)
    for _ in range(most):
        observations.append(np.asarray(seen))
        pictures.append(_picture(environment))
        action = playing(seen)
        if not playing.attentions:
            raise InputError("episode: this policy attends to nothing; take one with a decoder")
        weights.append(torch.stack(playing.attentions).flip(-1))
        seen, reward, terminated, truncated, _ = environment.step(action)
        rewards.append(float(reward))
        if terminated or truncated:
            break
    drawn = [picture for picture in pictures if picture is not None]
    return Episode(
        torch.stack(weights, 2), rewards, np.stack(observations), drawn if len(drawn) == len(pictures) else []
    )


def _picture(environment: Any) -> np.ndarray | None:
    """Return the frame that the environment renders, or None if it does not."""
    if environment.render_mode != "rgb_array":
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            picture = environment.render()
        except Exception:  # a library for rendering is missing
            return None
    return picture if isinstance(picture, np.ndarray) and picture.ndim == 3 else None


def draw_sheet(path: str | Path, episode: Episode) -> None:
    """Draw the mean weights over heads to `path`: an image per layer, steps to the right, the past upwards.

    Raises `InputError` if matplotlib is not installed.
    """
    weights = episode.weights.mean(1)
    layers = len(weights)
    columns = min(COLUMNS, layers)
    rows = -(-layers // columns)
    figure = new_figure(4 * columns + 1, 2.6 * rows + 0.4)
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for layer, axis in enumerate(axes.flat):
        if layer >= layers:
            axis.set_axis_off()
            continue
        image = weights[layer].T.cpu().numpy()
        axis.imshow(image, origin="lower", aspect="auto", cmap="viridis", vmin=0, vmax=1)
        axis.set_title(f"layer {layer + 1}", fontsize=9)
        axis.yaxis.get_major_locator().set_params(integer=True)
    for axis in axes[-1]:
        axis.set_xlabel("step of the episode")
    for axis in axes[:, 0]:
        axis.set_ylabel("steps ago")
    total = sum(episode.rewards)
    figure.suptitle(f"attention to the steps before, mean over heads; return {total:.2f}", fontsize=9)
    save_figure(figure, Path(path), write_output)


SIDE, MARGIN, LINE = 240, 12, 14
"""Pixels: the height of the images, the space around them, and a line of text."""

DARK, BRIGHT = np.array([24.0, 20.0, 60.0]), np.array([255.0, 232.0, 80.0])
"""The colours of the weights 0 and 1."""


def draw_gif(path: str | Path, episode: Episode, milliseconds: int = 200) -> None:
    """Write a frame for each step to `path`: the environment and, next to it, the attention of each head.

    Heads are rows, with the first layer at the top. The columns are the remembered steps, with the oldest on
    the left and the current step on the right. If the environment does not render, its observation is shown
    as bars. Raises `InputError` if Pillow is not installed.
    """
    with needs_extra("agents", "a GIF needs Pillow"):
        from PIL import Image
    frames = [_frame(Image, episode, step) for step in range(len(episode.rewards))]
    file = io.BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:], duration=milliseconds, loop=0)
    write_output(path, file.getvalue())


def _frame(image: Any, episode: Episode, step: int) -> Any:
    """Return the frame of a step; the step number in its text keeps equal frames from being merged."""
    from PIL import ImageDraw

    weights = episode.weights[:, :, step].flatten(0, 1).flip(-1).cpu().double().numpy()  # [L H, M + 1]
    heads = image.fromarray(_coloured(weights)).resize((SIDE, SIDE), image.Resampling.NEAREST)
    pixels = episode.pictures[step] if episode.pictures else _bars(episode.observations, step)
    shown = image.fromarray(np.ascontiguousarray(pixels)).convert("RGB")
    shown = shown.resize((max(1, round(shown.width * SIDE / shown.height)), SIDE))
    frame = image.new("RGB", (shown.width + SIDE + 3 * MARGIN, SIDE + 2 * MARGIN + 2 * LINE), "white")
    frame.paste(shown, (MARGIN, MARGIN))
    frame.paste(heads, (shown.width + 2 * MARGIN, MARGIN))
    draw, below = ImageDraw.Draw(frame), SIDE + MARGIN + 2
    total = sum(episode.rewards[: step + 1])
    draw.text((MARGIN, below), f"step {step + 1} of {len(episode.rewards)}", "black")
    draw.text((MARGIN, below + LINE), f"return {total:.2f}", "black")
    draw.text(
        (shown.width + 2 * MARGIN, below), f"{len(weights)} heads, {weights.shape[1] - 1} steps ago", "black"
    )
    draw.text((shown.width + 2 * MARGIN, below + LINE), "to now; dark 0, yellow 1", "black")
    return frame


def _coloured(weights: np.ndarray) -> np.ndarray:
    """Return weights from 0 to 1 as pixels."""
    return (DARK + weights[..., None].clip(0, 1) * (BRIGHT - DARK)).round().astype(np.uint8)


def _bars(observations: np.ndarray, step: int) -> np.ndarray:
    """Draw the numbers of an observation as bars, scaled to their range in the episode."""
    low, high = observations.min(0), observations.max(0)
    share = (observations[step] - low) / np.where(high > low, high - low, 1)
    heights = (share * SIDE).round().astype(int)
    filled = np.arange(SIDE, 0, -1)[:, None] <= heights
    bars = np.repeat(_coloured(filled.astype(float)), max(1, SIDE // len(heights)), 1)
    return bars[:, :: -(-bars.shape[1] // SIDE)]


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
        states = self._tensor(self.task.rows.scaled_states(observations))
        wanted = self._tensor(self.task.rows.scaled_returns(returns))[:, None]
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
        vectors = np.eye(len(self.task.metrics.usual))[actions] if self.task.config.discrete else actions
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
    reads = SpaceSizes(task.rows.state_size, len(task.metrics.usual), not task.config.discrete)
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
