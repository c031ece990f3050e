"""A pattern as data to draw, and as a figure: its mask, its layout, the keys of each query, and its paths.

A path leads from a token to another through layers that attend by the pattern; it is data, text and a figure
too.
"""

import dataclasses
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.attention.patterns.base import MaskMod, Pattern
from polyformer.attention.patterns.composition import as_pattern
from polyformer.attention.patterns.implied import restricted
from polyformer.attention.patterns.layout import Layout, count
from polyformer.attention.patterns.paths import path_lengths
from polyformer.core.errors import InputError
from polyformer.core.files import write_output
from polyformer.core.measuring import new_figure, save_figure
from polyformer.core.sequence.context import Context

LIMIT = 4096
"""The most tokens: a picture is dense."""

MOST_HEADS = 64
ROWS = 256  # queries per call of the mask function: its indices require eight bytes per pair

SKIPPED, FULL, MASKED = 0, 1, 2
"""The treatment of a pair by the layout: none; a score; a score that may then be masked."""


@dataclasses.dataclass(frozen=True, eq=False)
class PatternPicture:
    """The picture of a pattern for the heads `heads` of one layer.

    Args:
        text: the pattern as an expression.
        mask: [Tq, Tk] bool, whether the query (down) sees the key (across).
        work: [Tq, Tk] uint8, `SKIPPED`, `FULL` or `MASKED`.
    """

    text: str
    layer: int
    heads: tuple[int, ...]
    mask: Tensor
    work: Tensor

    @property
    def counts(self) -> list[int]:
        """The number of keys that each query sees."""
        return self.mask.sum(-1).tolist()

    @property
    def density(self) -> float:
        """The share of all pairs that is allowed."""
        return share(self.mask)

    def summary(self) -> str:
        """Return the numbers in a sentence."""
        counts, computed = self.counts, share(self.work != SKIPPED)
        return (
            f"Keys per query: {span(counts)}, {sum(counts) / len(counts):.4g} on average. Density "
            f"{100 * self.density:.3g} %. The layout computes {100 * computed:.3g} % of all scores, "
            f"{100 * share(self.work == FULL):.3g} % without a mask."
        )


def pictures(
    pattern: Pattern | MaskMod | str,
    context: Context,
    *,
    block: int = 16,
    heads: int = 4,
    layers: tuple[int, ...] = (0,),
) -> list[PatternPicture]:
    """Return a picture for each group of heads with the same mask and layout, in each of the layers.

    `context` has one batch row and its own limits count too. The layout has rows of `block` queries.
    Raises `InputError` for sizes that cannot be drawn.
    """
    check("length", max(context.q_len, context.kv_len), LIMIT)
    check("block", block, None)
    check("heads", heads, MOST_HEADS)
    pattern = as_pattern(pattern)
    panels: list[PatternPicture] = []
    for layer in layers:
        if layer < 0:
            raise InputError(f"layer: layers count from 0, got {layer}")
        own: list[PatternPicture] = []
        for head in range(heads):
            _join(own, _picture(pattern, context, block, layer, head))
        panels += own
    return panels


def check(name: str, value: int, most: int | None) -> None:
    """Raise `InputError` unless 1 <= value <= most."""
    if value < 1 or (most is not None and value > most):
        expected = "1 or more" if most is None else f"1 to {most}"
        raise InputError(f"{name}: expected {expected}, got {value}")


def span(numbers: list[int]) -> str:
    """Return the least and the greatest number: "3" or "3-9"."""
    least, greatest = min(numbers), max(numbers)
    return str(least) if least == greatest else f"{least}-{greatest}"


def share(flags: Tensor) -> float:
    """Return the share of true flags."""
    return int(flags.sum()) / flags.numel()


def labels(panels: list[PatternPicture]) -> list[str]:
    """Return the labels of the panels: their layers, if there are several, and their heads."""
    layers, names = {panel.layer for panel in panels}, []
    for panel in panels:
        words = [f"layer {panel.layer}"] if len(layers) > 1 else []
        if sum(other.layer == panel.layer for other in panels) > 1:
            plural = "s" if len(panel.heads) > 1 else ""
            words.append(f"head{plural} {', '.join(map(str, panel.heads))}")
        names.append(", ".join(words))
    return names


def _join(own: list[PatternPicture], panel: PatternPicture) -> None:
    """Add `panel` to the pictures of its layer, or its head to an equal picture."""
    for index, other in enumerate(own):
        if torch.equal(other.mask, panel.mask) and torch.equal(other.work, panel.work):
            own[index] = dataclasses.replace(other, heads=other.heads + panel.heads)
            return
    own.append(panel)


def _picture(pattern: Pattern, context: Context, block: int, layer: int, head: int) -> PatternPicture:
    here = pattern.layer_pattern(layer)
    whole = restricted(here, context)
    work = painted(whole.head_pattern(head).layout(context, block), context)
    return PatternPicture(here.to_text(), layer, (head,), dense(whole, context, head), work)


def dense(pattern: Pattern, context: Context, head: int) -> Tensor:
    """Return the mask of one head, [Tq, Tk] bool."""
    mask = torch.empty(context.q_len, context.kv_len, dtype=torch.bool)
    b, h = torch.zeros(1, 1, 1, 1, dtype=torch.long), torch.full((1, 1, 1, 1), head)
    kv_idx = torch.arange(context.kv_len)
    for start in range(0, context.q_len, ROWS):
        q_idx = torch.arange(start, min(start + ROWS, context.q_len)).view(-1, 1)
        mask[start : start + ROWS] = pattern.mask(context, b, h, q_idx, kv_idx).view(len(q_idx), -1)
    return mask


def painted(layout: Layout, context: Context) -> Tensor:
    """Return the treatment of each pair by the rows of a layout, [Tq, Tk] uint8."""
    work = torch.full((context.q_len, context.kv_len), SKIPPED, dtype=torch.uint8)
    for row in layout:
        assert count(row.keys.full) <= count(row.keys.some)
        for state, intervals in ((MASKED, row.keys.some), (FULL, row.keys.full)):
            for start, stop in intervals:
                work[row.start : row.stop, start:stop] = state
    return work


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
    write_title(figure, dict.fromkeys(panel.text for panel in panels))
    save_figure(figure, path, write_output)


def write_title(figure: Any, lines: Iterable[str]) -> None:
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


PATH_LIMIT = 1024
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
    check("length", context.q_len, PATH_LIMIT)
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
