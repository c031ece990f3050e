"""Docstrings as Markdown and as reStructuredText: prose, code in backticks, indented equations."""

import re
import textwrap
from collections.abc import Callable, Iterator

CODE = re.compile(r"(`[^`\n]+(?:\n[^`\n]+)?`)")


def blocks(doc: str) -> Iterator[tuple[bool, list[str]]]:
    """(whether it is an indented block, its lines): an equation may hold empty lines, a paragraph not.

    `doc` is without the indentation that a class gives its docstring (`inspect.cleandoc`).
    """
    lines, indented = [], False
    for line in doc.splitlines():
        deeper = line.startswith("    ")
        if not line.strip():
            if indented:
                lines.append("")
            elif lines:
                yield False, lines
                lines = []
        elif deeper != indented and not (deeper and lines and not indented and _continues(lines[-1])):
            if any(lines):
                yield indented, lines
            lines, indented = [line], deeper
        else:
            lines.append(line)
    if any(lines):
        yield indented, lines


def markdown(doc: str) -> str:
    """A docstring as Markdown; what would be markup by accident is escaped."""
    return _joined(doc, _markdown_prose, lambda code: f"```text\n{code}\n```")


def rst(doc: str) -> str:
    """A docstring as reStructuredText."""
    return _joined(doc, _rst_prose, lambda code: "::\n\n" + _indented(code))


def _joined(doc: str, prose: Callable[[str], str], literal: Callable[[str], str]) -> str:
    parts = [
        literal(textwrap.dedent("\n".join(lines)).strip()) if indented else prose("\n".join(lines))
        for indented, lines in blocks(doc)
    ]
    return "\n\n".join(parts)


def _continues(line: str) -> bool:
    """Whether a line is an item of a list, whose text may go on indented."""
    return line.startswith("- ")


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" if line else "" for line in text.splitlines())


def _markdown_prose(text: str) -> str:
    parts = CODE.split(text)
    return "".join(
        part if index % 2 else re.sub(r"([\\*_$<>\[\]{}])", r"\\\1", part) for index, part in enumerate(parts)
    )


def _rst_prose(text: str) -> str:
    result = ""
    for index, part in enumerate(CODE.split(text)):
        if index % 2:
            result += f"``{part[1:-1]}``" + "\\ "
        else:
            result += re.sub(r"([\\*_|`])", r"\\\1", part)
    return result
