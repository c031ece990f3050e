"""The paths of a pattern through layers: as data, as text and as a figure."""

import dataclasses
from pathlib import Path

import torch
from torch import Tensor

from polyformer.attention.patterns.base import Pattern
from polyformer.attention.patterns.paths import path_lengths
from polyformer.cli.plots.pattern import MOST_HEADS, check, write_title
from polyformer.core.files import write_output
from polyformer.core.measuring import new_figure, save_figure
from polyformer.core.sequence.context import Context

LIMIT = 1024
"""The most tokens with paths: each layer multiplies two matrices of this size."""


@dataclasses.dataclass(frozen=True, eq=False)
class PathPicture:
    """Picture of the paths of a pattern through layers: lengths [T, T], as `path_lengths` returns them."""

    text: str
    lengths: Tensor
    causal: bool

    def shares(self) -> list[float]:
        """Return the fraction of all pairs that 1, 2, ... layers connect; the last is the highest."""
        pairs = self.lengths.numel() - len(self.lengths)
        counts = torch.bincount(self.lengths[self.lengths > 0]).cumsum(0)[1:]
        return (counts / (pairs / 2 if self.causal else pairs)).tolist()

    def summary(self) -> str:
        """Return the numbers in a sentence."""
        shares, lengths = self.shares(), self.lengths[self.lengths > 0]
        if not shares:
            return "No pair of tokens is connected."
        layers = f"{len(shares)} layer{'s' * (len(shares) > 1)} ({lengths.double().mean():.3g} on average)"
        if shares[-1] == 1:
            return f"Every pair is connected within {layers}."
        return f"{100 * shares[-1]:.3g} % of the pairs are connected, within {layers}."


def path_picture(pattern: Pattern, context: Context, heads: int) -> PathPicture:
    """Return the picture of the paths between the tokens of a text through layers with `heads` heads."""
    check("length", context.q_len, LIMIT)
    check("heads", heads, MOST_HEADS)
    return PathPicture(pattern.to_text(), path_lengths(pattern, context, heads), context.causal)


def path_text(picture: PathPicture) -> str:
    """Return the pairs that are connected after each layer, a line for each layer."""
    bars = [f"{layer:>6} {100 * share:>5.1f} %" for layer, share in enumerate(picture.shares(), 1)]
    return "\n".join([picture.text, picture.summary(), "", "layers  pairs", *bars])


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
    write_title(figure, [picture.text, picture.summary()])
    save_figure(figure, path, write_output)
