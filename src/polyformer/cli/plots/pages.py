"""The pages of the documentation that show every pattern and every position scheme, with their pictures."""

import inspect
import re
import sys
import textwrap

from polyformer.attention.patterns.base import Pattern
from polyformer.attention.positions import PositionConfig
from polyformer.cli.plots.gallery import gallery_svg
from polyformer.cli.plots.pattern import pictures
from polyformer.cli.plots.position import position_picture, position_svg
from polyformer.cli.plots.svg import pattern_svg
from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.registry import in_package

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
