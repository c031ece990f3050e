"""A pattern as a figure: the mask, the layout, and the keys of each query, side by side."""

import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.cli.plots.pattern import FULL, MASKED, SKIPPED, PathPicture, PatternPicture, labels
from polyformer.core.figures import new_figure, save_figure
from polyformer.core.files import write_output

COLOURS = {
    SKIPPED: ("skipped", (1.0, 1.0, 1.0)),
    MASKED: ("computed with a mask", (0.97, 0.78, 0.47)),
    FULL: ("computed in full", (0.30, 0.55, 0.75)),
}
MOST = 320
"""The most points per side, fewer than a panel has pixels; in longer pictures a point is a mean of pairs."""

FAINT = 0.2
"""The minimum darkness of a point with a single allowed pair."""


def draw_pattern(panels: list[PatternPicture], path: Path) -> None:
    """Draw a row per panel into `path`, by its suffix. Raises `InputError` without matplotlib."""
    figure = new_figure(9.5, 3.6 * len(panels) + 0.4)
    rows = figure.subplots(len(panels), 3, squeeze=False, gridspec_kw={"width_ratios": (3, 3, 1.4)})
    for axes, panel, label in zip(rows, panels, labels(panels)):
        _row(axes, panel, label)
    _title(figure, dict.fromkeys(panel.text for panel in panels))
    save_figure(figure, path, write_output)


def draw_paths(picture: PathPicture, path: Path) -> None:
    """Draw the length of each pair's path and the pairs connected after each layer into `path`.

    Raises `InputError` without matplotlib.
    """
    figure = new_figure(9.5, 4.2)
    from matplotlib.ticker import MaxNLocator  # after `new_figure`, which names the extra if it is missing

    pairs, growth = figure.subplots(1, 2, gridspec_kw={"width_ratios": (1.15, 1)})
    lengths = picture.lengths.double()
    image = pairs.imshow(
        lengths.where(lengths >= 0, torch.nan).numpy(), cmap="viridis", interpolation="nearest"
    )
    pairs.set(xlabel="key", ylabel="query")
    pairs.set_title("layers until a query depends on a key", fontsize=9)
    figure.colorbar(image, ax=pairs, ticks=MaxNLocator(integer=True))
    shares = picture.shares()
    growth.plot(range(1, len(shares) + 1), shares, marker="o", markersize=3)
    growth.set(xlabel="layers", ylim=(0, 1.02))
    growth.xaxis.set_major_locator(MaxNLocator(integer=True))
    growth.set_title("fraction of the pairs connected", fontsize=9)
    _title(figure, [picture.text, picture.summary()])
    save_figure(figure, path, write_output)


def _title(figure: Any, lines: Iterable[str]) -> None:
    """Write lines above a figure, wrapped."""
    figure.suptitle("\n".join(line for text in lines for line in textwrap.wrap(text, 100)), fontsize=10)


def _row(axes: Any, panel: PatternPicture, label: str) -> None:
    """Draw one panel in three axes."""
    mask, layout, counts = axes
    queries, keys = panel.mask.shape
    edges = {"extent": (-0.5, keys - 0.5, queries - 0.5, -0.5), "aspect": "auto", "interpolation": "nearest"}
    allowed = smaller(panel.mask[..., None].double())[..., 0]
    shown = allowed.where(allowed == 0, FAINT + (1 - FAINT) * allowed)
    mask.imshow(shown.numpy(), cmap="Greys", vmin=0, vmax=1, **edges)
    mask.set_title(f"{label + ': ' if label else ''}mask, {100 * panel.density:.3g} % allowed", fontsize=9)
    mask.set_ylabel("query")
    colours = torch.tensor([COLOURS[state][1] for state in range(len(COLOURS))])
    layout.imshow(smaller(colours[panel.work.long()]).numpy(), **edges)
    computed = 100 * int((panel.work != SKIPPED).sum()) / panel.work.numel()
    layout.set_title(f"layout, {computed:.3g} % computed", fontsize=9)
    for name, colour in COLOURS.values():
        layout.plot([], [], "s", color=colour, markeredgecolor="grey", label=name)
    layout.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncol=3, frameon=False)
    counts.fill_betweenx(range(queries), panel.counts, step="mid", color="0.4")
    counts.set_ylim(queries - 0.5, -0.5)
    counts.set_xlim(0, None)
    counts.set_title("keys per query", fontsize=9)
    for axis in (mask, layout):
        axis.set_xlabel("key")


def smaller(picture: Tensor) -> Tensor:
    """Return a picture [n, m, channels] with at most `MOST` points per side, each the mean of its pixels."""
    step = -(-max(picture.shape[:2]) // MOST)
    return F.avg_pool2d(picture.movedim(-1, 0), step, ceil_mode=True, count_include_pad=False).movedim(0, -1)
