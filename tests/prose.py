"""Measure how plain the English of docstrings, comments and pages is: `python tests/prose.py src docs`.

Prints a line per root and ends with status 1 if a root is above a limit. `--lines` also prints every hit.
"""

import argparse
import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

UNUSUAL = {
    "alone": "only",
    "beside": "next to, compared with",
    "stands? (in|for|at|on)": "is",
    "lies (in|at|on)": "is",
    "whose": "its, with",
    "so many": "a number",
    "of which": "its, and each",
    "the one that": "the noun",
    "one that": "the noun",
    "those of": "the noun",
    "that of": "the noun",
    "taken up|takes up": "resumed",
    "settled": "resolved",
    "(goes|went|go) on": "continues",
    "told": "passed",
    "(is|are|was) asked": "receives",
    "ask(s|ed) for": "requests",
    "nothing of": "no",
    "a time": "per",
    "apart from": "except, separately",
    "by itself|for itself": "separately",
    "of (its|their|one's) own": "separate, own",
    "put together": "combine",
    "in place of": "instead of",
    "room for": "capacity",
    "what it": "the noun",
    "what is": "the noun",
    "whichever|wherever": "the condition",
}
"""Turns that papers of the field hardly use (regular expressions), and what to write."""

FRAGMENT = re.compile(
    "(What|Whether|Of|As|Where|That|How|Which|With|Without|It|Its|Nothing|One|Those|In|By|From|At|To|For|Over|Between|"
    r"After|Before)\b"
)
"""A docstring of a function or class starts with a verb or a noun phrase, not with these."""

LIMIT, FRAGMENTS = 1.0, 3.0  # unusual turns per 1,000 words; per cent of docstrings

TURNS = re.compile(r"\b(" + "|".join(UNUSUAL) + r")\b", re.IGNORECASE)


class Prose(NamedTuple):
    """The text of a file by its line, and the docstrings of its functions and classes."""

    lines: list[tuple[int, str]]
    docstrings: list[tuple[int, str]]


def python_prose(text: str) -> Prose:
    """Return docstrings and comments of Python source."""
    lines, docstrings = [], []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            docstring = ast.get_docstring(node)
            if docstring is None:
                continue
            first = node.body[0].lineno
            lines += [(first + number, line) for number, line in enumerate(docstring.splitlines())]
            if not isinstance(node, ast.Module):
                docstrings.append((first, docstring))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not re.match(r"#\s*(noqa|type|fmt|pyright)", token.string):
            lines.append((token.start[0], token.string))
    return Prose(lines, docstrings)


def page_prose(text: str) -> Prose:
    """Return the sentences of Markdown: no code blocks, no tables."""
    lines, code = [], False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            code = not code
        elif not code and not line.startswith("|"):
            lines.append((number, line))
    return Prose(lines, [])


def files(root: Path) -> Iterator[Path]:
    """Yield the Python files and English pages of a root."""
    paths = [root] if root.is_file() else sorted(root.rglob("*"))
    for path in paths:
        if path.suffix in (".py", ".md") and not {"vi", "build", "node_modules"} & set(path.parts):
            yield path


def measure(root: Path, show: bool) -> bool:
    """Print the figures of a root and return whether it is within the limits."""
    words = docstrings = 0
    hits: list[str] = []
    fragments: list[str] = []
    for path in files(root):
        text = path.read_text(encoding="utf-8")
        prose = python_prose(text) if path.suffix == ".py" else page_prose(text)
        docstrings += len(prose.docstrings)
        for number, line in prose.lines:
            words += len(re.findall(r"[A-Za-z']+", line))
            for hit in TURNS.finditer(line):
                hits.append(f"{path}:{number}: {hit[0]}: {line.strip()}")
        fragments += [
            f"{path}:{number}: {docstring.splitlines()[0]}"
            for number, docstring in prose.docstrings
            if FRAGMENT.match(docstring)
        ]
    rate, share = 1000 * len(hits) / max(words, 1), 100 * len(fragments) / max(docstrings, 1)
    if show:
        print(*hits, *fragments, sep="\n")
    print(f"{root}: {words} words, {rate:.1f} unusual turns per 1,000; {share:.1f} % fragments")
    return rate <= LIMIT and share <= FRAGMENTS


def repeated_classes(package: Path) -> list[str]:
    """Return "folder: name" of each class name that a folder of the package defines twice."""
    result = []
    for folder in sorted(path for path in package.iterdir() if path.is_dir()):
        names: dict[str, str] = {}
        for path in sorted(folder.rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    if node.name in names:
                        result.append(f"{path}: class {node.name} is also in {names[node.name]}; rename one")
                    names.setdefault(node.name, str(path))
    return result


def main() -> int:
    """Measure the roots on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("roots", nargs="+", type=Path)
    parser.add_argument("--lines", action="store_true", help="print every hit")
    options = parser.parse_args()
    repeated = repeated_classes(Path("src/polyformer"))
    print(*repeated, sep="\n", end="\n" if repeated else "")
    within = [measure(root, options.lines) for root in options.roots]
    return 0 if all(within) and not repeated else 1


if __name__ == "__main__":
    raise SystemExit(main())
