"""The page docs/claims.md: every claim as its study states it, with its verdict in the pages of results.

A record is a comment in docs/results.md or docs/results/*.md next to its figures:

    <!-- claim NAME | VERDICT | SEEDS | DATE | WHAT CAME OUT -->

with a verdict of `OUTCOMES`, the number of training seeds (0 if the study trains no model, `any` if training
uses no random numbers, so that all seeds give the same result), and the figures in words.

`Citations` says whether the tests, claims, pages, presets, examples and commands that a page cites exist.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from polyformer.cli.commands import COMMANDS
from polyformer.core.errors import InputError, quote
from polyformer.models.presets import MODELS
from polyformer_lab.results import OUTCOMES
from polyformer_lab.study import Claim, Study, study_names

MARK = re.compile(r"^<!-- claim (.*?) -->$", re.MULTILINE)
HEADING = re.compile(r"^#{1,3} (.*)$", re.MULTILINE)

BAR = "\\|"
"""The escaped bar inside a table in Markdown."""

ALIKE = "any"
"""The entry instead of the number of seeds if the seed changes nothing."""

ENOUGH = 3
"""The number of seeds required for a trained figure."""


@dataclasses.dataclass(frozen=True)
class Recorded:
    """The record of a claim, with the heading of its section and the path of its page in `docs`."""

    verdict: str
    seeds: int | None  # None: a seed changes nothing
    date: str
    figures: str
    heading: str
    page: str


@dataclasses.dataclass(frozen=True)
class Stated:
    """A claim with its name and the study that measures it."""

    study: str
    name: str
    claim: Claim


def result_pages(docs: Path) -> dict[str, str]:
    """Return the texts of docs/results.md and docs/results/*.md by their paths in `docs`."""
    paths = [docs / "results.md", *sorted((docs / "results").glob("*.md"))]
    return {path.relative_to(docs).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def recorded(pages: Mapping[str, str]) -> dict[str, Recorded]:
    """Return the records in the pages of results by the name of the claim.

    Raises `InputError` for a malformed record.
    """
    records: dict[str, Recorded] = {}
    for page, text in pages.items():
        headings = [(match.start(), match[1]) for match in HEADING.finditer(text)]
        for mark in MARK.finditer(text):
            cells = [cell.strip() for cell in mark[1].split("|", 4)]
            named = len(cells) == 5 and cells[1] in OUTCOMES and cells[0] not in records
            if not named or not (cells[2].isdigit() or cells[2] == ALIKE):
                raise InputError(
                    f"docs/{page}: {mark[0]}: expected a claim that has no other record, one of "
                    f"{', '.join(OUTCOMES)}, a number of seeds or {quote(ALIKE)}, a date and a sentence"
                )
            heading = [title for start, title in headings if start < mark.start()][-1]
            seeds = None if cells[2] == ALIKE else int(cells[2])
            records[cells[0]] = Recorded(cells[1], seeds, cells[3], cells[4], heading, page)
    return records


def anchor(heading: str) -> str:
    """Return the anchor of a heading in a link."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def claims_page(results: Mapping[str, str]) -> str:
    """Return docs/claims.md. `results` maps paths in `docs` to the texts of the pages of results.

    Raises `InputError` for records of unknown claims.
    """
    records, every = recorded(results), [Study.load(name) for name in study_names()]
    claims = [Stated(each.name, name, claim) for each in every for name, claim in each.claims.items()]
    if unknown := sorted(records.keys() - {stated.name for stated in claims}):
        raise InputError(
            f"the pages of results have records of claims that no study states: {', '.join(unknown)}"
        )
    counts = [
        f"{sum(record.verdict == outcome for record in records.values())} {outcome}" for outcome in OUTCOMES
    ]
    lines = [
        HEAD.format(
            claims=len(claims), modules=sum(bool(each.claims) for each in every), counts=", ".join(counts)
        )
    ]
    lines += ["| claim | source | verdict | seeds | command |", "|---|---|---|---|---|"]
    lines += [_row(stated, records.get(stated.name)) for stated in claims]
    few = [each.name for each in claims if each.name in records and _few(records[each.name])]
    if few:
        lines.append(FEW.format(enough=ENOUGH, few=", ".join(f"[{name}](#{name})" for name in few)))
    lines += [_section(stated, records.get(stated.name)) for stated in claims]
    return "\n".join(lines)


def _few(record: Recorded) -> bool:
    return record.seeds is not None and 0 < record.seeds < ENOUGH


def _row(stated: Stated, record: Recorded | None) -> str:
    cells = (
        f"[{stated.claim.claim}](#{stated.name})",
        stated.claim.source,
        record.verdict if record else "not run yet",
        SEEDS.get(record.seeds, str(record.seeds)) if record else "",
        f"`{stated.study}`",
    )
    return f"| {' | '.join(cell.replace('|', BAR) for cell in cells)} |"


def _section(stated: Stated, record: Recorded | None) -> str:
    claim = stated.claim
    lines = [
        f"\n## {stated.name}\n",
        f"*{claim.claim[0].upper()}{claim.claim[1:]}* ({claim.source}).\n",
        f"- Published: {claim.published}.",
        f"- Measured: {claim.measured}; {claim.scale}. `polyformer reproduce {stated.study}`.",
        f"- Rule: {claim.rule}.",
    ]
    if record is None:
        return "\n".join([*lines, "- Not run yet at this size."])
    seeds = {None: "all seeds alike", 0: "nothing trained", 1: "**one seed**"}.get(
        record.seeds, f"{record.seeds} seeds"
    )
    where = f"[{record.heading}]({record.page}#{anchor(record.heading)})"
    verdict = f"**{record.verdict[0].upper()}{record.verdict[1:]}**: {record.figures}"
    return "\n".join([*lines, f"- {verdict} ({seeds}, {record.date}; {where})."])


SEEDS = {None: "all alike", 0: "none trained"}

HEAD = """# Claims

{claims} claims of the papers, measured by {modules} commands `polyformer reproduce NAME`, each with the rule
of its verdict. A rule is written before the run; otherwise the record says so. [Results](results.md) have
the figures, machines and dates.

Verdicts: {counts}. *Not at this scale*: the run was too small to decide.
*Undecided*: single seeds would give different verdicts, so their mean decides nothing.

`polyformer reproduce all --data DIR --out OUT` runs all of them and makes one page with figures and tables.
With `--quick` it takes minutes and only checks that every path runs. `make docs` makes this page from the
files of the claims and the records in the pages of results.
"""

FEW = """
A trained figure should have {enough} seeds. These have fewer: {few}.
"""


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
