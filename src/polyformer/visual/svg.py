"""Small SVG pictures for the documentation: the same bytes at every build, so that stale ones are found.

Cells of one colour are one path of runs, a stroke as wide as a cell for each. No library, no dates.
"""

import html
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.visual.pattern import MASKED, SKIPPED, PatternPicture, labels
from polyformer.visual.position import PositionPicture

SIDE, TOP, GAP = 240, 18, 16  # of a panel, its label, and between panels, in pixels
BAR = 48  # for the counts of keys
GREY, LIGHT, DARK, SEEN = "#666", "#d9d9d9", "#1f5a8c", "#6ba3d0"
HEADS = "#1f5a8c", "#c8641e", "#3b8f4a", "#8a4fa3"
LEVELS = 8  # of a heat map


def pattern_svg(panels: list[PatternPicture]) -> str:
    """Panels side by side, each a square of what is seen and computed and how, and the counts of keys."""
    parts = []
    for index, (panel, label) in enumerate(zip(panels, labels(panels))):
        queries, keys = panel.mask.shape
        seen, masked = panel.mask, panel.work == MASKED
        cells = [(LIGHT, ~seen & (panel.work != SKIPPED)), (SEEN, seen & masked), (DARK, seen & ~masked)]
        bars = torch.arange(keys) < torch.tensor(panel.counts).view(-1, 1)
        left = index * (SIDE + GAP + BAR + GAP)
        parts.append(
            _text(left, label or "query down, key across")
            + _place(left, SIDE, queries, keys, [_path(colour, flags) for colour, flags in cells])
            + _text(left + SIDE + 8, "keys")
            + _place(left + SIDE + 8, BAR, queries, keys, [_path(GREY, bars)])
        )
    return _document(len(panels) * (SIDE + GAP + BAR + GAP) - GAP, parts)


def position_svg(picture: PositionPicture) -> str:
    """Curves over distance, a head each, where there is nothing else to see; else a heat map."""
    curves = picture.by_distance
    if curves is not None:
        return _document(2 * SIDE, [_curves(curves, picture.groups)])
    label, values = next(iter(picture.panels.items()))
    low, high = float(values.min()), float(values.max())
    level = ((values - low) / max(high - low, 1e-12)).mul(LEVELS).add(1e-6).floor().clamp(0, LEVELS - 1)
    shades = [f"hsl(210 60% {95 - 75 * i // (LEVELS - 1)}%)" for i in range(LEVELS)]
    cells = [_path(shades[i], level == i) for i in range(LEVELS)]
    legend = f"{label}: {low:.3g} (light) to {high:.3g} (dark)"
    return _document(SIDE, [_text(0, legend), _place(0, SIDE, values.shape[0], values.shape[1], cells)])


def runs(flags: Tensor) -> list[tuple[int, int, int]]:
    """The runs of true cells in the rows of [n, m], as (column, row, width)."""
    cells = []
    for y, row in enumerate(F.pad(flags.int(), (1, 1)).diff()):
        starts, stops = (row == 1).nonzero().flatten().tolist(), (row == -1).nonzero().flatten().tolist()
        cells += [(start, y, stop - start) for start, stop in zip(starts, stops)]
    return cells


def _path(colour: str, flags: Tensor) -> str:
    """The true cells as strokes, along rows or along columns, whichever are fewer."""
    across, down = runs(flags), runs(flags.T)
    if len(across) <= len(down):
        data, middle = "".join(f"M{x} {y}h{width}" for x, y, width in across), "0 .5"
    else:
        data, middle = "".join(f"M{x} {y}v{height}" for y, x, height in down), ".5 0"
    return f'<path stroke="{colour}" transform="translate({middle})" d="{data}"/>' if data else ""


def _place(left: int, width: int, rows: int, columns: int, paths: list[str]) -> str:
    """Paths in cells, stretched to `width` pixels, with a frame."""
    frame = f'<rect x="{left}" y="{TOP}" width="{width}" height="{SIDE}" fill="none" stroke="{GREY}"/>'
    scale = f"translate({left} {TOP}) scale({width / columns:.5g} {SIDE / rows:.5g})"
    return f'<g transform="{scale}" shape-rendering="crispEdges">{"".join(paths)}</g>\n{frame}\n'


def _curves(curves: Tensor, groups: dict[str, list[int]]) -> str:
    """A line for each group of heads [H, 2T - 1]; on the right the key lies before the query."""
    farthest = curves.shape[1] // 2
    known = curves[curves.isfinite()]
    low, high = float(known.min()), float(known.max())
    across, down = SIDE / max(farthest, 1), SIDE / max(high - low, 1e-12)
    lines = [
        _text(0, f"{low:.3g} to {high:.3g}, at distances {-farthest} to {farthest}"),
        f'<rect y="{TOP}" width="{2 * SIDE}" height="{SIDE}" fill="none" stroke="{GREY}"/>\n',
        f'<path stroke="{LIGHT}" d="M{SIDE} {TOP}v{SIDE}"/>\n',
    ]
    for index, (label, heads) in enumerate(groups.items()):
        points = " ".join(
            f"{i * across:.1f},{TOP + (high - y) * down:.1f}"
            for i, y in enumerate(curves[heads[0]].tolist())
            if math.isfinite(y)
        )
        colour = HEADS[index % len(HEADS)]
        lines.append(f'<polyline fill="none" stroke="{colour}" points="{points}"/>\n')
        lines.append(_text(SIDE + 60 * index, label, colour))
    return "".join(lines)


def _text(left: int, text: str, colour: str = GREY) -> str:
    font = f'font-family="sans-serif" font-size="11" fill="{colour}"'
    return f'<text x="{left}" y="{TOP - 6}" {font}>{html.escape(text)}</text>\n'


def _document(width: int, parts: list[str]) -> str:
    height = TOP + SIDE
    size = f'width="{width + 4}" height="{height + 4}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="-2 -2 {width + 4} {height + 4}">\n'
        f'<rect x="-2" y="-2" {size} fill="#fff"/>\n{"".join(parts)}</svg>\n'
    )
