"""docs/claims.md: every claim as its module states it, beside the verdict that docs/results.md records.

A record is a comment in docs/results.md beside its figures:

    <!-- claim NAME | VERDICT | SEEDS | DATE | WHAT CAME OUT -->

with a verdict of `OUTCOMES`, the number of seeds that were trained with (0 where nothing is trained, `any`
where training draws nothing, so that all seeds are alike), and what came out.
"""

import dataclasses
import re
from collections.abc import Mapping

from polyformer.bench.experiment import OUTCOMES, Claim
from polyformer.bench.gallery.jobs import measurables
from polyformer.core.errors import InputError, quote

MARK = re.compile(r"^<!-- claim (.*?) -->$", re.MULTILINE)
HEADING = re.compile(r"^#{2,3} (.*)$", re.MULTILINE)

BAR = "\\|"
"""What stands for a bar inside a table."""

ALIKE = "any"
"""In the place of the number of seeds, where a seed changes nothing."""

ENOUGH = 3
"""Seeds that a trained figure should have."""


@dataclasses.dataclass(frozen=True)
class Recorded:
    """What was measured of a claim, and under which heading of docs/results.md it stands."""

    verdict: str
    seeds: int | None  # None: a seed changes nothing
    date: str
    figures: str
    heading: str


def recorded(text: str) -> dict[str, Recorded]:
    """The records in docs/results.md, by the claim's name; `InputError` for what is no record."""
    headings = [(match.start(), match[1]) for match in HEADING.finditer(text)]
    records: dict[str, Recorded] = {}
    for mark in MARK.finditer(text):
        cells = [cell.strip() for cell in mark[1].split("|", 4)]
        named = len(cells) == 5 and cells[1] in OUTCOMES and cells[0] not in records
        if not named or not (cells[2].isdigit() or cells[2] == ALIKE):
            raise InputError(
                f"docs/results.md: {mark[0]}: expected a claim that has no other record, one of "
                f"{', '.join(OUTCOMES)}, a number of seeds or {quote(ALIKE)}, a date and a sentence"
            )
        heading = [title for start, title in headings if start < mark.start()][-1]
        seeds = None if cells[2] == ALIKE else int(cells[2])
        records[cells[0]] = Recorded(cells[1], seeds, cells[3], cells[4], heading)
    return records


def anchor(heading: str) -> str:
    """A heading's name in a link."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def claims_page(results: str) -> str:
    """docs/claims.md; `results`: the text of docs/results.md. `InputError` for records of unknown claims."""
    records, every = recorded(results), measurables()
    claims = [(each.name, claim) for each in every for claim in each.experiment.claims]
    if unknown := sorted(records.keys() - {claim.name for _, claim in claims}):
        raise InputError(f"docs/results.md has records of claims that no module states: {', '.join(unknown)}")
    counts = [
        f"{sum(record.verdict == outcome for record in records.values())} {outcome}" for outcome in OUTCOMES
    ]
    lines = [HEAD.format(claims=len(claims), modules=len(every), counts=", ".join(counts))]
    lines += ["| claim | source | verdict | seeds | command |", "|---|---|---|---|---|"]
    lines += [_row(name, claim, records) for name, claim in claims]
    few = [claim.name for _, claim in claims if claim.name in records and _few(records[claim.name])]
    if few:
        lines.append(FEW.format(enough=ENOUGH, few=", ".join(f"[{name}](#{name})" for name in few)))
    for name, claim in claims:
        lines.append(_section(name, claim, records.get(claim.name)))
    return "\n".join(lines)


def _few(record: Recorded) -> bool:
    return record.seeds is not None and 0 < record.seeds < ENOUGH


def _row(name: str, claim: Claim, records: Mapping[str, Recorded]) -> str:
    record = records.get(claim.name)
    cells = (
        f"[{claim.says}](#{claim.name})",
        f"{claim.paper}, {claim.section}",
        record.verdict if record else "not run yet",
        SEEDS.get(record.seeds, str(record.seeds)) if record else "",
        f"`{name}`",
    )
    return f"| {' | '.join(cell.replace('|', BAR) for cell in cells)} |"


def _section(name: str, claim: Claim, record: Recorded | None) -> str:
    lines = [
        f"\n## {claim.name}\n",
        f"*{claim.says[0].upper()}{claim.says[1:]}* ({claim.paper}, {claim.section}).\n",
        f"- Published: {claim.published}.",
        f"- Measured: {claim.measured}; {claim.scale}. `polyformer reproduce {name}`.",
        f"- Rule: {claim.rule}.",
    ]
    if record is None:
        return "\n".join([*lines, "- Not run yet at this size."])
    seeds = {None: "all seeds alike", 0: "nothing trained", 1: "**one seed**"}.get(
        record.seeds, f"{record.seeds} seeds"
    )
    where = f"[{record.heading}](results.md#{anchor(record.heading)})"
    verdict = f"**{record.verdict[0].upper()}{record.verdict[1:]}**: {record.figures}"
    return "\n".join([*lines, f"- {verdict} ({seeds}, {record.date}; {where})."])


SEEDS = {None: "all alike", 0: "none trained"}

HEAD = """# Claims

{claims} claims of the papers, measured by {modules} commands `polyformer reproduce NAME`, each with the rule
of its verdict, which was written before the run (where it was not, the record says so). Recorded in
[results.md](results.md), where machine and command stand beside the figures: {counts}.
*Not at this scale*: what was run could not have shown it either way.

`polyformer reproduce all --data DIR --out OUT` runs all of them and makes one page with figures and tables;
with `--quick` in minutes, to see that every path runs. This page is made from the modules and from the
records in results.md by `make docs`.
"""

FEW = """
Trained figures should have {enough} seeds and their spread. These have fewer, and mean no more than that:
{few}.
"""
