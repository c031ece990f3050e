"""A heat map of a number for every layer and head."""

from pathlib import Path

from torch import Tensor

from polyformer.core.files import write_output
from polyformer.core.measuring import new_figure, save_figure


def draw_head_map(values: Tensor, title: str, label: str, path: Path) -> None:
    """Draw values [layers, H], white for 0; the suffix of `path` determines the format.

    Raises `InputError` without matplotlib.
    """
    layers, heads = values.shape
    figure = new_figure(0.4 * heads + 2.5, 0.25 * layers + 1.5)
    axes = figure.subplots()
    most = values.abs().max().item() or 1.0
    shown = axes.imshow(values.numpy(), aspect="auto", cmap="RdBu_r", vmin=-most, vmax=most)
    figure.colorbar(shown, ax=axes, label=label)
    axes.set(xlabel="head", ylabel="layer", xticks=range(heads), yticks=range(0, layers, 1 + layers // 20))
    figure.suptitle(title, fontsize=10)
    save_figure(figure, path, write_output)
