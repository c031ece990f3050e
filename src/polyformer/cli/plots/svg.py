"""Small SVG pictures of patterns, and the pages of the documentation that show them.

The bytes are the same at every build, so that stale pictures are detected. Cells of one colour are one path
of runs, a stroke as wide as a cell for each. No library, no dates. `gallery_svg` is the picture on the front
page, ten patterns at a glance; `pages` shows every pattern and every position scheme.
"""

import html
import inspect
import re
import sys
import textwrap

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.attention.patterns.base import Pattern
from polyformer.attention.positions import PositionConfig
from polyformer.cli.plots.pattern import MASKED, SKIPPED, PatternPicture, dense, labels, pictures
from polyformer.cli.plots.position import position_picture, position_svg
from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.registry import in_package
from polyformer.core.sequence.context import Context

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
COLUMNS, PANEL_SIDE, PANEL_GAP, TITLE = (
    5,
    144,
    18,
    20,
)  # panels in a row; pixels of a panel, around it and of its title
INK, PAPER, TEXT = "#1f5a8c", "#eef3f7", "#556"


def gallery_svg() -> str:
    """Return the masks of `GALLERY` as small squares, query down and key across."""
    rows = -(-len(GALLERY) // COLUMNS)
    width, height = (
        COLUMNS * (PANEL_SIDE + PANEL_GAP) - PANEL_GAP,
        rows * (PANEL_SIDE + TITLE + PANEL_GAP) - PANEL_GAP,
    )
    panels = [_panel(index, *entry) for index, entry in enumerate(GALLERY.items())]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" aria-label="Ten attention patterns">\n'
        f'<rect width="{width}" height="{height}" fill="#fff"/>\n{"".join(panels)}</svg>\n'
    )


def _panel(index: int, title: str, expression: str) -> str:
    """Return a titled mask at its place in the grid."""
    left = index % COLUMNS * (PANEL_SIDE + PANEL_GAP)
    top = index // COLUMNS * (PANEL_SIDE + TITLE + PANEL_GAP)
    mask = dense(Pattern.from_text(expression), Context(TOKENS, TOKENS), head=0)
    cells = "".join(f"M{x} {y}h{length}" for x, y, length in runs(mask))
    font = f'font-family="sans-serif" font-size="12" fill="{TEXT}"'
    return (
        f'<text x="{left}" y="{top + TITLE - 7}" {font}>{html.escape(title)}</text>\n'
        f'<g transform="translate({left} {top + TITLE}) scale({PANEL_SIDE / TOKENS:g})" '
        f'shape-rendering="crispEdges">'
        f'<rect width="{TOKENS}" height="{TOKENS}" fill="{PAPER}"/>'
        f'<path stroke="{INK}" transform="translate(0 .5)" d="{cells}"/></g>\n'
    )


BLOCK, HEADS, LENGTH = 8, 4, 32  # queries in a row of a layout, heads, tokens of a position scheme

PATTERNS = """# Patterns

Each row of a picture is a query and each column a key. Dark blue: visible, computed without a mask. Light
blue: visible, computed with a mask. Grey: computed, then masked. White: skipped. The bars show the number of
keys of each query. The layout has {block} queries per row in the pictures; real layouts have longer rows.
Patterns are combined with `&` and `|`: `polyformer show pattern "Window(8) | Global(2)"` draws any pattern.
With `--paths` it shows how many layers connect each pair of tokens.

`make docs` generates this page and its pictures.
"""

POSITIONS = """# Positions

Each picture shows the effect of a scheme, either on the score of two equal tokens or on the input. Scores are
drawn by the distance from the query back to the key, with a line for each head. They are means over all
directions of the token vector. For the input, some channels of the added vectors are drawn. Parameters are
random here, so the pictures of learned schemes show which parameters are shared, not their values.
`polyformer show position alibi --out alibi.png` draws a scheme larger.

`make docs` generates this page and its pictures.
"""


def pages() -> dict[str, str]:
    """Return every file of the pages, by its path under `docs`."""
    files, text = {}, [PATTERNS.format(block=BLOCK)]
    for name, pattern in sorted(Pattern.registry.items()):
        if in_package(pattern):
            section, files[f"patterns/{name}.svg"] = pattern_section(name, pattern)
            text.append(section)
    files["patterns.md"], files["gallery.svg"] = "\n".join(text), gallery_svg()
    text = [POSITIONS]
    for kind, scheme in sorted(PositionConfig.kinds.items()):
        assert issubclass(scheme, PositionConfig)
        if not in_package(scheme):
            continue
        section, picture = position_section(kind, scheme)
        text.append(section)
        if picture is not None:
            files[f"positions/{kind}.svg"] = picture
    files["positions.md"] = "\n".join(text)
    return files


def pattern_section(name: str, member: type[Pattern]) -> tuple[str, str]:
    """Return the text about a pattern, and its picture."""
    pattern, context = member.picture()
    layers = (0, 1) if pattern.layer_pattern(0) != pattern.layer_pattern(1) else (0,)
    panels = pictures(pattern, context, block=BLOCK, heads=HEADS, layers=layers)
    numbers = "\n".join(f"- {panel.text}: {panel.summary()}" for panel in panels)
    if len(panels) == 1:
        numbers = panels[0].summary()
    expression = f"`{pattern.to_text()}` over {context.q_len} tokens:"
    image = f"![{name}](patterns/{name}.svg)"
    return _section(*_head(name, member, member.__doc__), expression, image, numbers), pattern_svg(panels)


def position_section(kind: str, member: type[PositionConfig]) -> tuple[str, str | None]:
    """Return the text about a scheme, and its picture; none if it has no effect before training."""
    head = _head(kind, member, described(kind, member) or sys.modules[member.__module__].__doc__)
    try:
        picture = position_picture(member.examples()[0], LENGTH, HEADS)
    except InputError:
        return _section(*head, "It changes neither scores nor input."), None
    if picture.scores is None and picture.learned:
        return _section(*head, "A table of learned vectors; there is no picture before training."), None
    image = f"![{kind}](positions/{kind}.svg)"
    return _section(*head, f"{picture.effect.capitalize()}:", image), position_svg(picture)


def described(name: str, member: type[Config]) -> str | None:
    """Return the docstring of a member that shares its file with others, with its equation.

    The docstring of such a file begins with a table. The rows of a member begin with its name; further rows
    are indented. None if the file has no row for the member.
    """
    table = sys.modules[member.__module__].__doc__ or ""
    row = re.search(rf"^    {re.escape(name)} .*(?:\n     .*)*", table, re.MULTILINE)
    if row is None:
        return None
    equation = textwrap.indent(textwrap.dedent(row[0].replace(name, " " * len(name), 1)), "    ")
    summary, *rest = inspect.cleandoc(member.__doc__ or "").split("\n\n")
    return "\n\n".join([summary, equation, *rest])


def _section(*paragraphs: str) -> str:
    return "\n\n".join(paragraphs) + "\n"


def _head(name: str, member: type[Pattern] | type[PositionConfig], doc: str | None) -> list[str]:
    """Return title, docstring and source."""
    source = [f"{member.paper}."] if member.paper else []
    return [f"## {name}", inspect.cleandoc(doc or "").strip(), *source]
