"""An episode on a sheet: the weights by which each step attends to the steps before it, layer by layer."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.core.figures import new_figure, save_figure
from polyformer.model.policy import Policy

COLUMNS = 4
"""Layers side by side."""


@torch.no_grad()
def episode_weights(policy: Policy, environment: Any, seed: int, most: int) -> tuple[Tensor, list[float]]:
    """An episode of the most probable actions, of at most `most` steps: weights [L, T, 1 + M] of the steps 0
    to M ago, the mean over heads, and the rewards. Raises `InputError` for a policy without attention."""
    state, weights, rewards = None, list[Tensor](), list[float]()
    observation, _ = environment.reset(seed=seed)
    device = next(policy.parameters()).device
    for _ in range(most):
        seen = torch.as_tensor(observation, dtype=torch.float32, device=device)
        output = policy(seen[None, None], state=state, output_attentions=True)
        if not output.attentions:
            raise InputError("episode: this policy attends to nothing; take one with a decoder")
        state = output.state
        weights.append(torch.stack([layer[0, :, 0].mean(0).flip(-1) for layer in output.attentions]))
        observation, reward, terminated, truncated, _ = environment.step(int(output.logits.argmax()))
        rewards.append(float(reward))
        if terminated or truncated:
            break
    return torch.stack(weights, 1), rewards


def draw_episode(path: str | Path, weights: Tensor, rewards: list[float]) -> None:
    """Draw the weights [L, T, 1 + M] of an episode into `path`: a picture a layer, steps to the right, the
    past upwards. Raises `InputError` where matplotlib is not installed."""
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
    figure.suptitle(f"attention to the steps before, mean over heads; return {sum(rewards):.2f}", fontsize=9)
    save_figure(figure, Path(path))
