"""The page of studies: for every claim the published statement, its rule, figures, table and verdict."""

import base64
import html
import itertools
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from polyformer.cli.plots.report.page import details, figure, page, section, tiles
from polyformer.core.files import atomic_write
from polyformer.core.ops.tuning import processor
from polyformer_lab.comparison import HEAD, comparison_note, differences
from polyformer_lab.machine import code_version, versions
from polyformer_lab.results import MEANINGLESS, UNSHOWN, Verdict, by_name, outcomes
from polyformer_lab.study import Claim

if TYPE_CHECKING:
    from polyformer_lab.engine import Running

SHORT, LONG = 16, 400
"""The most rows of a table that is open at first, and of any table that is shown."""

QUICK = "Quick: sizes so small that every path runs and no figure means anything."


def write_page(file: Path, studies: Sequence["Running"], quick: bool) -> None:
    """Write the page of all studies, finished or not."""
    verdicts = {each.study.name: _verdicts(each, quick) for each in studies}
    every = [verdict for own in verdicts.values() for verdict in own.values()]
    total = sum(len(each.study.claims) for each in studies)
    numbers = [("claims", str(total), f"{len(every)} judged")]
    claims = [claim for each in studies for claim in each.study.claims.values()]
    words = dict.fromkeys(itertools.chain.from_iterable(map(outcomes, claims)))
    numbers += [(outcome, str(sum(own.outcome == outcome for own in every)), "") for outcome in words]
    sections = [tiles(numbers)] if total else []
    if len(studies) > 1:
        sections.append(_overview(studies, verdicts))
    sections += [_section(each, verdicts[each.study.name]) for each in studies]
    installed = versions()
    subtitle = (
        f"{datetime.now(UTC).date().isoformat()}; {processor()}, {os.cpu_count()} cores; "
        f"Python {installed['python']}, torch {installed['torch']}, {code_version()}. {QUICK * quick}"
    )
    title = "the claims" if len(studies) > 1 else studies[0].study.name
    atomic_write(file, page(f"polyformer: {title}", subtitle.strip(), sections).encode())


def _verdicts(each: "Running", quick: bool) -> dict[str, Verdict]:
    if not each.cells or each.waiting:
        return {}
    own = by_name(each.results, each.study.claims)
    if quick:
        return {name: Verdict(UNSHOWN, MEANINGLESS + verdict.text) for name, verdict in own.items()}
    return own


def _overview(studies: Sequence["Running"], verdicts: dict[str, dict[str, Verdict]]) -> str:
    rows = []
    for each in studies:
        for name, claim in each.study.claims.items():
            verdict = verdicts[each.study.name].get(name)
            link = f'<a href="#claim-{html.escape(name)}">{html.escape(claim.claim)}</a>'
            seeds = ", ".join(map(str, each.study.seeds))
            outcome = verdict.outcome if verdict else _state(each)
            rows.append([link, *map(html.escape, (claim.source, seeds, outcome))])
    text = "Each verdict follows from the figures by a rule that was written before the run."
    return section("All claims", text, grid(["claim", "source", "seeds", "verdict"], rows, "left"))


def _state(each: "Running") -> str:
    """Return the reason why there is no verdict."""
    if each.obstacle:
        return f"not run: {each.obstacle}"
    failed = [f"{cell.title}: {problem}" for cell, problem in each.failures.items()]
    if failed:
        return "; ".join(failed)
    return (
        f"{len(each.waiting)} of {len(each.cells)} runs to do" if each.waiting else "left out by its settings"
    )


def _section(each: "Running", verdicts: dict[str, Verdict]) -> str:
    parts = []
    for name, claim in each.study.claims.items():
        verdict = verdicts.get(name, Verdict("no verdict", _state(each)))
        parts.append(_statement(name, claim, verdict))
    parts.append(details("Command", f"<pre>{html.escape(each.command)}</pre>"))
    parts += [
        f'<p class="soft">{html.escape(f"{cell.title}: {problem}")}</p>'
        for cell, problem in each.failures.items()
    ]
    parts += [_picture(file, each.captions.get(file.name, "")) for file in sorted(each.out.glob("*.png"))]
    head, *rows = each.results.table() if each.cells else [[]]
    if rows:
        content = grid(head, [list(map(html.escape, row)) for row in rows[:LONG]])
        seeds = len(each.study.seeds)
        words = f"mean ± standard error (range) over {seeds} seeds" if seeds > 1 else "results"
        caption = f"{words}, {min(len(rows), LONG)} of {len(rows)} rows"
        parts.append(f"<p>{caption}</p>{content}" if len(rows) <= SHORT else details(caption, content))
        parts.append(_comparisons(each))
    facts = "\n".join(f"{cell.title}: {facts}" for cell in each.cells if (facts := cell.facts))
    parts.append(details("Runs", f"<pre>{html.escape(facts)}</pre>") if facts else "")
    return section(each.study.name, each.study.note or f"polyformer reproduce {each.study.name}", *parts)


def _comparisons(each: "Running") -> str:
    """Return the table of the paired tests; empty with a single seed or label."""
    lines = [list(map(html.escape, each.line())) for each in differences(each.results)]
    if not lines:
        return ""
    note = comparison_note(len(each.results.seeds))
    return details(
        f"Differences, {len(lines)} comparisons", f"<p>{html.escape(note)}</p>{grid(HEAD, lines[:LONG])}"
    )


def grid(head: Sequence[str], rows: Sequence[Sequence[str]], align: str = "right") -> str:
    """Return a table whose cells are HTML."""
    style = f'style="text-align:{align}"'
    columns = "".join(f'<th scope="col" {style}>{html.escape(name)}</th>' for name in head)
    body = "".join("<tr>" + "".join(f"<td {style}>{cell}</td>" for cell in row) + "</tr>\n" for row in rows)
    return f'<div class="wide"><table><thead><tr>{columns}</tr></thead>\n<tbody>{body}</tbody></table></div>'


def _statement(name: str, claim: Claim, verdict: Verdict) -> str:
    rows = {
        "published": claim.published,
        "measured here": "; ".join(filter(None, (claim.measured, claim.scale))),
        "rule": claim.rule or "; ".join(claim.holds),
        verdict.outcome: verdict.text,
    }
    terms = "".join(
        f"<dt><b>{html.escape(key)}</b></dt><dd>{html.escape(value)}</dd>"
        for key, value in rows.items()
        if value
    )
    return (
        f'<h3 id="claim-{html.escape(name)}">{html.escape(claim.claim)}</h3>\n'
        f'<p class="soft">{html.escape(claim.source)}</p>\n<dl>{terms}</dl>'
    )


def _picture(file: Path, caption: str) -> str:
    data = base64.b64encode(file.read_bytes()).decode()
    image = f'<img style="max-width:100%" alt="{html.escape(file.stem)}" src="data:image/png;base64,{data}">'
    return figure(image, f"{file.name}: {caption}" if caption else file.name)
