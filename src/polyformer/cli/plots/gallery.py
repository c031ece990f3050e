"""The picture on the front page: ten attention patterns at a glance."""

import html

from polyformer.attention.patterns.base import Pattern
from polyformer.cli.plots.pattern import dense
from polyformer.cli.plots.svg import runs
from polyformer.core.sequence.context import Context

GALLERY = {
    "full": "Full()",
    "causal": "Causal()",
    "sliding window": "Window(3)",
    "Longformer": "Window(2) | Global(2)",
    "dilated": "Window(3, dilation=3)",
    "strided": "Causal() & (Window(6, 0) | Strided(6))",
    "fixed": "Causal() & Fixed(8, 2)",
    "BigBird": "BlockWindow(4) | Global(4) | Random(1, 4)",
    "ETC": "ETC(6, 3)",
    "image, 2D": "Local2D([6, 6], [2, 3], [1, 1, 1])",
}
"""Pairs of a title and the expression that draws it."""

TOKENS = 36
COLUMNS, SIDE, GAP, TITLE = 5, 144, 18, 20  # panels in a row; pixels of a panel, around it and of its title
INK, PAPER, TEXT = "#1f5a8c", "#eef3f7", "#556"


def gallery_svg() -> str:
    """Return the masks of `GALLERY` as small squares, query down and key across."""
    rows = -(-len(GALLERY) // COLUMNS)
    width, height = COLUMNS * (SIDE + GAP) - GAP, rows * (SIDE + TITLE + GAP) - GAP
    panels = [_panel(index, *entry) for index, entry in enumerate(GALLERY.items())]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" aria-label="Ten attention patterns">\n'
        f'<rect width="{width}" height="{height}" fill="#fff"/>\n{"".join(panels)}</svg>\n'
    )


def _panel(index: int, title: str, expression: str) -> str:
    """Return a titled mask at its place in the grid."""
    left = index % COLUMNS * (SIDE + GAP)
    top = index // COLUMNS * (SIDE + TITLE + GAP)
    mask = dense(Pattern.from_text(expression), Context(TOKENS, TOKENS), head=0)
    cells = "".join(f"M{x} {y}h{length}" for x, y, length in runs(mask))
    font = f'font-family="sans-serif" font-size="12" fill="{TEXT}"'
    return (
        f'<text x="{left}" y="{top + TITLE - 7}" {font}>{html.escape(title)}</text>\n'
        f'<g transform="translate({left} {top + TITLE}) scale({SIDE / TOKENS:g})" '
        f'shape-rendering="crispEdges">'
        f'<rect width="{TOKENS}" height="{TOKENS}" fill="{PAPER}"/>'
        f'<path stroke="{INK}" transform="translate(0 .5)" d="{cells}"/></g>\n'
    )
