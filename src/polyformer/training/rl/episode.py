"""An episode of a policy with the attention weights of each step to earlier steps, and their figure."""

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.core.figures import new_figure, save_figure
from polyformer.core.files import write_output
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
