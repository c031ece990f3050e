"""A position scheme as a figure: the terms added to the scores of each head, and to the input."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyformer.cli.plots.position import PositionPicture
from polyformer.core.figures import figure_svg, new_figure, save_figure
from polyformer.core.files import write_output

COLUMNS = 3
FEATURES = 4
"""The features of vectors that are drawn as lines in a small picture."""

DIGITS = 6
"""The precision to which numbers are rounded first, so that a picture is the same on every processor."""

ADDED, DISTANCE = "added to the score (logits)", "how far the key lies before the query (tokens)"


def draw_position(picture: PositionPicture, path: Path) -> None:
    """Draw into `path`; its suffix determines the format. Raises `InputError` without matplotlib."""
    panels, curves = picture.panels, picture.by_distance
    number = len(panels) + (curves is not None)
    columns, rows = min(number, COLUMNS), -(-number // COLUMNS)
    figure = new_figure(4.2 * columns, 3.4 * rows + 0.4)
    axes = list(figure.subplots(rows, columns, squeeze=False).flatten())
    for label, values in panels.items():
        axis, down, across, colour = axes.pop(0), "position (tokens)", "feature", "added to the input"
        if label.startswith("scores"):
            down, across, colour = "query (token)", "key (token)", ADDED
        image = axis.imshow(values.numpy(), aspect="auto", interpolation="nearest")
        figure.colorbar(image, ax=axis, label=colour)
        axis.set(title=label, ylabel=down, xlabel=across)
    if curves is not None:
        axis = axes.pop(0)
        axis.set_title("scores by distance")
        _draw_curves(axis, curves, picture.groups)
    for axis in axes:
        axis.set_visible(False)
    figure.suptitle(picture.title, fontsize=10)
    save_figure(figure, path, write_output)


def position_svg(picture: PositionPicture) -> str:
    """Return a small picture of lines: scores over distance, a line for each head.

    If scores depend on more than the distance, the lines are scores of the middle query over keys; for
    vectors they are some features over positions. Raises `InputError` without matplotlib.
    """
    figure = new_figure(5.2, 3.2)
    axis, curves = figure.subplots(), picture.by_distance
    if curves is not None:
        _draw_curves(axis, curves, picture.groups)
    elif picture.scores is not None:
        middle = picture.length // 2
        lines = {label: picture.scores[heads[0], middle] for label, heads in picture.groups.items()}
        _draw_lines(axis, torch.arange(picture.length), lines)
        axis.set(xlabel=f"key (token), for query {middle}", ylabel=ADDED)
    else:
        assert picture.vectors is not None
        features = range(0, picture.vectors.shape[1], -(-picture.vectors.shape[1] // FEATURES))
        lines = {f"feature {i}": picture.vectors[:, i] for i in features}
        _draw_lines(axis, torch.arange(picture.length), lines)
        axis.set(xlabel="position (tokens)", ylabel="added to the input")
    return figure_svg(figure)


def _draw_curves(axis: Any, curves: Tensor, groups: dict[str, list[int]]) -> None:
    """Draw scores [H, 2T - 1] over distance, a line for each group of heads."""
    farthest = curves.shape[1] // 2
    axis.axvline(0, color="lightgrey", linewidth=0.8)
    lines = {label: curves[heads[0]] for label, heads in groups.items()}
    _draw_lines(axis, torch.arange(-farthest, farthest + 1), lines)
    axis.set(xlabel=DISTANCE, ylabel=ADDED)


def _draw_lines(axis: Any, x: Tensor, lines: dict[str, Tensor]) -> None:
    """Draw lines with a legend; infinite values are omitted."""
    for label, y in lines.items():
        axis.plot(x.tolist(), y.double().round(decimals=DIGITS).tolist(), label=label, linewidth=1.2)
    axis.legend(fontsize=7, frameon=False)
