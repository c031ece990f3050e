"""An episode of a policy with the attention weights of each step to earlier steps, as a figure or a GIF."""

import dataclasses
import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.core.files import write_output
from polyformer.core.imports import needs_extra
from polyformer.core.measuring import new_figure, save_figure
from polyformer.models.architectures.policy import Policy
from polyformer.training.rl.policy_player import PolicyPlayer

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
