"""`Citations`: whether the tests, claims, pages, presets, examples and commands that a page cites exist."""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from polyformer.cli.commands import COMMANDS
from polyformer.models.presets import MODELS
from polyformer_lab.catalogue import HEADING, Recorded, anchor
from polyformer_lab.study import study_names

TEST = re.compile(r"^ *def (test_\w+)\(", re.MULTILINE)
CLAIM, PRESET, COMMAND, EXAMPLE = "claim:", "preset:", "polyformer ", "examples/"


class Citations:
    """The things that a page of a checkout can cite.

    Args:
        root: the folder of the checkout.
        records: the recorded claims by name.
    """

    def __init__(self, root: Path, records: Mapping[str, Recorded]):
        self.root, self.records = root, records

    def verdict(self, cited: tuple[str, ...]) -> str:
        """Return the recorded verdict of the first claim in `cited`; "" without a claim."""
        names = [text.removeprefix(CLAIM) for text in cited if text.startswith(CLAIM)]
        return self.records[names[0]].verdict if names and names[0] in self.records else ""

    def problems(self, cited: str) -> Iterator[str]:
        """Yield the reasons why a citation is wrong."""
        name = cited.removeprefix(CLAIM).removeprefix(PRESET)
        if cited.startswith("tests/"):
            file, _, test = cited.partition("::")
            if test not in _tests(self.root / file):
                yield "there is no such test"
        elif cited.startswith(CLAIM):
            if name not in self.records:
                yield "no claim of this name is recorded"
        elif cited.startswith(PRESET):
            if name not in MODELS.names():
                yield "there is no such preset"
        elif cited.startswith(COMMAND):
            words = cited.split()[1:]
            if words[0] not in COMMANDS:
                yield "there is no such command"
            elif words[0] == "reproduce" and words[1] not in study_names():
                yield f"there is no study {words[1]!r}"
        else:
            path, _, heading = cited.partition("#")
            if not self._file(path).is_file():
                yield "there is no such page, picture or example"
            elif heading and heading not in _anchors(self._file(path)):
                yield f"the page has no heading with the anchor {heading!r}"

    def has_heading(self, page: str, heading: str) -> bool:
        """Return whether a page of docs has a heading."""
        return anchor(heading) in _anchors(self.root / "docs" / page)

    def rendered(self, cited: str, up: str) -> str:
        """Return a citation in Markdown, in a page from which `up` leads to docs."""
        if cited.startswith(CLAIM):
            name = cited.removeprefix(CLAIM)
            return f"[{name}]({up}claims.md#{name})"
        if cited.startswith(PRESET):
            return f"[`{cited.removeprefix(PRESET)}`]({up}presets.md)"
        if cited.startswith(("tests/", COMMAND, EXAMPLE)):
            return f"`{cited}`"
        path, _, heading = cited.partition("#")
        return f"[{heading.replace('-', ' ') or path}]({up}{cited})"

    def _file(self, path: str) -> Path:
        return self.root / path if path.startswith(EXAMPLE) else self.root / "docs" / path


@cache
def _tests(file: Path) -> set[str]:
    return set(TEST.findall(file.read_text(encoding="utf-8"))) if file.is_file() else set()


@cache
def _anchors(file: Path) -> set[str]:
    return {anchor(heading) for heading in HEADING.findall(file.read_text(encoding="utf-8"))}
