"""Convert docstrings to Markdown and reStructuredText: prose, code in backticks, indented equations."""

import re
import textwrap
from collections.abc import Callable, Iterator

CODE = re.compile(r"(`[^`\n]+(?:\n[^`\n]+)?`)")


def blocks(doc: str) -> Iterator[tuple[bool, list[str]]]:
    """Yield (whether the block is indented, its lines). Only an indented block may contain empty lines.

    `doc` must have no common indentation (`inspect.cleandoc`).
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
    """Return a docstring as Markdown, with accidental markup escaped."""
    return _joined(doc, _markdown_prose, lambda code: f"```text\n{code}\n```")


def rst(doc: str) -> str:
    """Return a docstring as reStructuredText."""
    return _joined(doc, _rst_prose, lambda code: "::\n\n" + _indented(code))


def _joined(doc: str, prose: Callable[[str], str], literal: Callable[[str], str]) -> str:
    parts = [
        literal(textwrap.dedent("\n".join(lines)).strip()) if indented else prose("\n".join(lines))
        for indented, lines in blocks(doc)
    ]
    return "\n\n".join(parts)


def _continues(line: str) -> bool:
    """Return whether a line is a list item, which may continue with indented lines."""
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
