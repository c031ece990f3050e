"""An episode as a GIF: each frame shows the environment and, next to it, the attention of each head.

Heads are rows, with the first layer at the top. The columns are the remembered steps, with the oldest on the
left and the current step on the right. If the environment does not render, its observation is shown as bars.
"""

import io
from pathlib import Path
from typing import Any

import numpy as np

from polyformer.core.files import write_output
from polyformer.core.optional_packages import needs_extra
from polyformer.training.rl.episode import Episode

SIDE, MARGIN, LINE = 240, 12, 14
"""Pixels: the height of the images, the space around them, and a line of text."""

DARK, BRIGHT = np.array([24.0, 20.0, 60.0]), np.array([255.0, 232.0, 80.0])
"""The colours of the weights 0 and 1."""


def draw_gif(path: str | Path, episode: Episode, milliseconds: int = 200) -> None:
    """Write a frame for each step to `path`. Raises `InputError` if Pillow is not installed."""
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
