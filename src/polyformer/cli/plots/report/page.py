"""The page around the sections of a report: one file, with its style and its script inside."""

import html
from collections.abc import Mapping, Sequence
from importlib.resources import files

FOOTER = "Written by polyformer. The page is one file and loads nothing from elsewhere."


def page(title: str, subtitle: str, sections: Sequence[str], script: str = "") -> str:
    """Return a whole document. `sections` are HTML, all else is text; `script` is JavaScript run last."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>\n{asset('style.css')}</style>\n</head>\n<body>\n"
        f'<header><h1>{html.escape(title)}</h1><p class="soft">{html.escape(subtitle)}</p></header>\n'
        f"<main>\n{chr(10).join(sections)}\n</main>\n<footer><p>{FOOTER}</p></footer>\n"
        f"{''.join(f'<script>{each}</script>' for each in (script, save_buttons()) if each)}\n"
        "</body>\n</html>\n"
    )


def save_buttons() -> str:
    """Return the script that adds a button to each figure, which saves it as a file."""
    return (files("polyformer.cli.plots.explorer") / "figures.js").read_text(encoding="utf-8")


def asset(name: str) -> str:
    """Return the text of a file next to this module."""
    return (files("polyformer.cli.plots.report") / name).read_text(encoding="utf-8")


def section(title: str, text: str, *parts: str) -> str:
    """Return a section: a heading, a sentence that explains the content, and parts of HTML."""
    name = title.lower().replace(" ", "-")
    heading = f'<h2 id="{name}">{html.escape(title)}</h2>\n<p class="soft">{html.escape(text)}</p>'
    return f'<section aria-labelledby="{name}">\n{heading}\n{chr(10).join(parts)}\n</section>'


def tiles(facts: Sequence[tuple[str, str, str]]) -> str:
    """Return large numbers side by side: a name, a number and a remark each."""
    cells = (
        f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(number)}<small>{html.escape(remark)}</small></dd></div>"
        for name, number, remark in facts
    )
    return f'<dl class="tiles">{"".join(cells)}</dl>'


def table(caption: str, columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> str:
    """Return a table of rows of cells, each row headed by its name."""
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in ("", *columns))
    body = "".join(
        f'<tr><th scope="row">{html.escape(name)}</th>'
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
        + "</tr>\n"
        for name, cells in rows.items()
    )
    text = f'<caption class="soft">{html.escape(caption)}</caption>' if caption else ""
    content = f"{text}<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>"
    return f'<div class="wide"><table>{content}</table></div>'


def figure(content: str, caption: str = "", name: str = "") -> str:
    """Return a picture with a caption."""
    text = f"<figcaption>{html.escape(caption)}</figcaption>" if caption else ""
    return f"<figure{f' class={chr(34)}{name}{chr(34)}' if name else ''}>{content}{text}</figure>"


def details(summary: str, content: str) -> str:
    """Return content that is opened by a click or a key."""
    return f"<details><summary>{html.escape(summary)}</summary>\n{content}\n</details>"
