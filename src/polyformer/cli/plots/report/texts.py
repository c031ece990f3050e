"""Tables of texts from data: hostile input, so that every text is escaped and has its own direction."""

import html
from collections.abc import Callable, Mapping, Sequence

LONG, MOST = 240, 4000
"""Characters of a text that are shown at once, and those that can be opened."""


def text_cell(text: str) -> str:
    """Return a cell with a text; of a long text the rest is opened by a click or a key."""
    if len(text) <= LONG:
        return f'<td dir="auto">{html.escape(text)}</td>'
    rest = text[LONG:MOST] + ("…" if len(text) > MOST else "")
    return (
        f'<td dir="auto"><details><summary>{html.escape(text[:LONG])}…</summary>'
        f"{html.escape(rest)}</details></td>"
    )


def number_cell(value: float) -> str:
    """Return a cell with a number with one digit after the point."""
    return f"<td>{value:.1f}</td>"


def example_table(
    columns: Sequence[str], groups: Mapping[str, Sequence[int]], cells: Callable[[int], Sequence[str]]
) -> str:
    """Return a table of examples by group; `cells` returns the HTML of the cells of an example."""
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in columns)
    bodies = (
        f'<tbody><tr><th scope="rowgroup" colspan="{len(columns)}">{html.escape(name)}</th></tr>\n'
        + "".join(f"<tr>{''.join(cells(number))}</tr>\n" for number in numbers)
        + "</tbody>"
        for name, numbers in groups.items()
        if numbers
    )
    content = f"<thead><tr>{head}</tr></thead>\n{''.join(bodies)}"
    return f'<div class="wide"><table class="examples">{content}</table></div>'
