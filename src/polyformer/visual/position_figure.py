"""A position scheme as a figure: what it adds to the scores of each head, and to the input."""

from pathlib import Path

from polyformer.core.figures import new_figure, save_figure
from polyformer.visual.position import PositionPicture

COLUMNS = 3


def draw_position(picture: PositionPicture, path: Path) -> None:
    """Draw into `path`, whose ending says the format; `InputError` without matplotlib."""
    panels, curves = picture.panels, picture.by_distance
    number = len(panels) + (curves is not None)
    columns, rows = min(number, COLUMNS), -(-number // COLUMNS)
    figure = new_figure(4.2 * columns, 3.4 * rows + 0.4)
    axes = list(figure.subplots(rows, columns, squeeze=False).flatten())
    for label, values in panels.items():
        axis, down, across = axes.pop(0), "position", "feature"
        if label.startswith("scores"):
            down, across = "query", "key"
        figure.colorbar(axis.imshow(values.numpy(), aspect="auto", interpolation="nearest"), ax=axis)
        axis.set(title=label, ylabel=down, xlabel=across)
    if curves is not None:
        axis, farthest = axes.pop(0), picture.length - 1
        for label, heads in picture.groups.items():
            axis.plot(range(-farthest, farthest + 1), curves[heads[0]].numpy(), label=label)
        axis.set(title="scores by distance", xlabel="how far the key lies before the query")
        axis.legend(fontsize=7, frameon=False)
    for axis in axes:
        axis.set_visible(False)
    figure.suptitle(picture.title, fontsize=10)
    save_figure(figure, path)
