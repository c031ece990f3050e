"""The pages of the documentation that show every pattern and every position scheme, with their pictures."""

import inspect
import sys

from polyformer.attention.patterns.base import Pattern
from polyformer.attention.positions import PositionConfig
from polyformer.cli.plots.gallery import gallery_svg
from polyformer.cli.plots.pattern import pictures
from polyformer.cli.plots.position import position_picture
from polyformer.cli.plots.position_figure import position_svg
from polyformer.cli.plots.svg import pattern_svg
from polyformer.core.errors import InputError
from polyformer.core.registry import in_package

BLOCK, HEADS, LENGTH = 8, 4, 32  # queries in a row of a layout, heads, tokens of a position scheme

PATTERNS = """# Patterns

Who may see whom: a query is a row, a key a column. Dark blue: seen, and computed without a mask. Light blue:
seen, and computed with a mask. Grey: computed, then masked. White: skipped. The bars are the keys of each
query. Layouts are drawn in rows of {block} queries; real ones have longer rows. Patterns join by `&` and `|`:
`polyformer show pattern "Window(8) | Global(2)"` draws any of them.

This page and its pictures are made by `make docs`.
"""

POSITIONS = """# Positions

What each scheme does to the score of two equal tokens, by how far the key lies before the query (a line for
each head), or some features of the vectors that it adds to the input. Scores are means over the directions
that a token's vector may have. Parameters are random here: what is learned shows how it is shared, not what
is learned.
`polyformer show position alibi --out alibi.png` draws any of them larger.

This page and its pictures are made by `make docs`.
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
    head = _head(kind, member, sys.modules[member.__module__].__doc__)
    try:
        picture = position_picture(member.examples()[0], LENGTH, HEADS)
    except InputError:
        return _section(*head, "It leaves scores and input alone."), None
    if picture.scores is None and picture.learned:
        return _section(*head, "A table of learned vectors; there is nothing to see before training."), None
    image = f"![{kind}](positions/{kind}.svg)"
    return _section(*head, f"{picture.effect.capitalize()}:", image), position_svg(picture)


def _section(*paragraphs: str) -> str:
    return "\n\n".join(paragraphs) + "\n"


def _head(name: str, member: type[Pattern] | type[PositionConfig], doc: str | None) -> list[str]:
    """Return title, docstring and source."""
    source = [f"{member.paper}."] if member.paper else []
    return [f"## {name}", inspect.cleandoc(doc or "").strip(), *source]
