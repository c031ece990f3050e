"""Small SVG pictures of patterns: the same bytes at every build, so that stale pictures are detected.

Cells of one colour are one path of runs, a stroke as wide as a cell for each. No library, no dates.
"""

import html

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.cli.plots.pattern import MASKED, SKIPPED, PatternPicture, labels

SIDE, TOP, GAP = 240, 18, 16  # of a panel, its label, and between panels, in pixels
BAR = 48  # for the counts of keys
GREY, LIGHT, DARK, SEEN = "#666", "#d9d9d9", "#1f5a8c", "#6ba3d0"


def pattern_svg(panels: list[PatternPicture]) -> str:
    """Return panels side by side, each a square of attended and computed pairs, and the counts of keys."""
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


def runs(flags: Tensor) -> list[tuple[int, int, int]]:
    """Return the runs of true cells in the rows of [n, m], as (column, row, width)."""
    cells = []
    for y, row in enumerate(F.pad(flags.int(), (1, 1)).diff()):
        starts, stops = (row == 1).nonzero().flatten().tolist(), (row == -1).nonzero().flatten().tolist()
        cells += [(start, y, stop - start) for start, stop in zip(starts, stops)]
    return cells


def _path(colour: str, flags: Tensor) -> str:
    """Return the true cells as strokes, along rows or along columns, whichever are fewer."""
    across, down = runs(flags), runs(flags.T)
    if len(across) <= len(down):
        data, middle = "".join(f"M{x} {y}h{width}" for x, y, width in across), "0 .5"
    else:
        data, middle = "".join(f"M{x} {y}v{height}" for y, x, height in down), ".5 0"
    return f'<path stroke="{colour}" transform="translate({middle})" d="{data}"/>' if data else ""


def _place(left: int, width: int, rows: int, columns: int, paths: list[str]) -> str:
    """Return paths in cells, stretched to `width` pixels, with a frame."""
    frame = f'<rect x="{left}" y="{TOP}" width="{width}" height="{SIDE}" fill="none" stroke="{GREY}"/>'
    scale = f"translate({left} {TOP}) scale({width / columns:.5g} {SIDE / rows:.5g})"
    return f'<g transform="{scale}" shape-rendering="crispEdges">{"".join(paths)}</g>\n{frame}\n'


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
