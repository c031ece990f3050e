"""The page of a gallery: for every claim what was published, how it is judged, figures, table and verdict."""

import base64
import html
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from polyformer.bench.experiment import OUTCOMES, UNSHOWN, Claim, Verdict, concluded, joined
from polyformer.bench.gallery import tables
from polyformer.bench.gallery.job import FACTS
from polyformer.bench.gallery.jobs import Job
from polyformer.bench.gallery.processes import LOG
from polyformer.bench.machine import code_version, versions
from polyformer.core.errors import InputError
from polyformer.core.files import atomic_write, read_json
from polyformer.ops.tuning.machine import processor
from polyformer.visual.report.page import details, figure, page, section, tiles

PAGE = "claims.html"
SHORT, LONG = 16, 400
"""Rows of a table that is open from the first, and of the longest that is shown."""

ANCHOR = "claim-"
"""What a claim's name in a link begins with: modules of one claim have the same name."""

QUICK = "Quick: sizes so small that every path runs and no figure means anything."


def write_page(out: Path, jobs: Sequence[Job], failures: Mapping[Job, str], quick: bool) -> Path:
    """Write OUT/claims.html by what lies in the runs' folders; returns where it is."""
    by_name: dict[str, list[Job]] = {}
    for job in jobs:
        by_name.setdefault(job.of.name, []).append(job)
    shown = {name: judged(own, quick) for name, own in by_name.items()}
    verdicts = [verdict for own in shown.values() for verdict in own.values()]
    total = sum(len(own[0].of.experiment.claims) for own in by_name.values())
    numbers = [("claims", str(total), f"{len(verdicts)} judged")]
    numbers += [
        (outcome, str(sum(verdict.outcome == outcome for verdict in verdicts)), "") for outcome in OUTCOMES
    ]
    sections = [tiles(numbers), overview(by_name, shown, failures)]
    sections += [part(own, shown[name], failures) for name, own in by_name.items()]
    when, versioned = datetime.now(UTC).date().isoformat(), versions()
    subtitle = (
        f"{when}; {processor()}, {os.cpu_count()} cores; Python {versioned['python']}, torch "
        f"{versioned['torch']}, {code_version()}. {QUICK if quick else ''}"
    )
    atomic_write(out / PAGE, page("polyformer: the claims", subtitle.strip(), sections).encode())
    return out / PAGE


def judged(jobs: Sequence[Job], quick: bool) -> dict[str, Verdict]:
    """The verdict of each claim over the seeds that have come to their end, by the claim's name."""
    records = [(job, concluded(job.folder)) for job in jobs if job.finished]
    results = {}
    for claim in jobs[0].of.experiment.claims:
        own = [
            (job, Verdict(**record["verdicts"][claim.name]))
            for job, record in records
            if record is not None and claim.name in record["verdicts"]
        ]
        if own:
            several = len(own) > 1
            text = "\n".join((f"seed {job.seed}: " if several else "") + each.text for job, each in own)
            whole = joined([each for _, each in own], text)
            results[claim.name] = Verdict(UNSHOWN, f"sizes without a meaning: {text}") if quick else whole
    return results


def overview(
    by_name: Mapping[str, Sequence[Job]],
    shown: Mapping[str, Mapping[str, Verdict]],
    failures: Mapping[Job, str],
) -> str:
    """All claims in a table."""
    rows = []
    for name, own in by_name.items():
        for claim in own[0].of.experiment.claims:
            verdict = shown[name].get(claim.name)
            link = f'<a href="#{ANCHOR}{html.escape(claim.name)}">{html.escape(claim.says)}</a>'
            cells = (
                f"{claim.paper}, {claim.section}",
                seeds_of(own),
                verdict.outcome if verdict else state(own, failures),
            )
            rows.append([link, *map(html.escape, cells)])
    text = "Each verdict follows from the figures by a rule that was written before the run."
    return section("All claims", text, grid(["claim", "source", "seeds", "verdict"], rows, "left"))


def grid(head: Sequence[str], rows: Sequence[Sequence[str]], align: str = "right") -> str:
    """A table whose cells are HTML."""
    style = f'style="text-align:{align}"'
    columns = "".join(f'<th scope="col" {style}>{html.escape(name)}</th>' for name in head)
    body = "".join("<tr>" + "".join(f"<td {style}>{cell}</td>" for cell in row) + "</tr>\n" for row in rows)
    return f'<div class="wide"><table><thead><tr>{columns}</tr></thead>\n<tbody>{body}</tbody></table></div>'


def seeds_of(jobs: Sequence[Job]) -> str:
    """The seeds of what has come to its end, "" of what draws nothing."""
    finished = [job for job in jobs if job.finished]
    if jobs[0].seed is not None:
        return ", ".join(str(job.seed) for job in finished)
    seeds = jobs[0].config.to_dict().get("seeds", ()) if finished and jobs[0].config else ()
    return ", ".join(map(str, seeds))


def state(jobs: Sequence[Job], failures: Mapping[Job, str]) -> str:
    """Why there is no verdict."""
    lacks = {job.lacks for job in jobs if job.lacks}
    if lacks:
        return f"not run: needs {'; '.join(sorted(lacks))}"
    failed = [f"{job.title}: {failures[job]}" for job in jobs if failures.get(job)]
    if failed:
        return "; ".join(failed)
    return "left out by its settings" if all(job.finished for job in jobs) else "not run yet"


def part(jobs: Sequence[Job], verdicts: Mapping[str, Verdict], failures: Mapping[Job, str]) -> str:
    """The section of one experiment."""
    parts = []
    for claim in jobs[0].of.experiment.claims:
        verdict = verdicts.get(claim.name)
        said = verdict or Verdict(UNSHOWN, state(jobs, failures))
        outcome = verdict.outcome if verdict else "no verdict"
        parts.append(statement(claim, outcome, said.text))
    finished = [job for job in jobs if job.finished]
    commands = "\n".join(job.command for job in jobs)
    parts.append(details("Command", f"<pre>{html.escape(commands)}</pre>"))
    problems = [f"{job.title}: {failures[job]} ({job.folder / LOG})" for job in jobs if failures.get(job)]
    parts += [f'<p class="soft">{html.escape(problem)}</p>' for problem in problems]
    for job in finished:
        parts += [picture(file, job.title) for file in sorted(job.folder.glob("*.png"))]
        parts.append(f'<p class="soft">{html.escape(facts(job))}</p>')
    if finished:
        parts += [
            figures(name, finished) for name in sorted(f.name for f in finished[0].folder.glob("*.csv"))
        ]
    return section(jobs[0].of.name, f"polyformer reproduce {jobs[0].of.name}", *parts)


def statement(claim: Claim, outcome: str, text: str) -> str:
    """A claim, how it is judged, and the verdict."""
    rows = {
        "published": claim.published,
        "measured here": f"{claim.measured}; {claim.scale}",
        "rule": claim.rule,
        outcome: text,
    }
    terms = "".join(
        f"<dt><b>{html.escape(name)}</b></dt><dd>{html.escape(value).replace(chr(10), '<br>')}</dd>"
        for name, value in rows.items()
    )
    source = html.escape(f"{claim.paper}, {claim.section}")
    return (
        f'<h3 id="{ANCHOR}{html.escape(claim.name)}">{html.escape(claim.says)}</h3>\n'
        f'<p class="soft">{source}</p>\n<dl>{terms}</dl>'
    )


def facts(job: Job) -> str:
    """When and where a run was made; its settings may have been run alone, which writes no such file."""
    file = job.folder / FACTS
    try:
        told_of = read_json(file, dict) if file.is_file() else {}
    except InputError:
        told_of = {}
    words = [f"{name} {value}" for name, value in told_of.items()]
    return ", ".join([job.title, *words])


def picture(file: Path, title: str) -> str:
    """A figure, inside the page."""
    data = base64.b64encode(file.read_bytes()).decode()
    label = html.escape(f"{title}: {file.stem}")
    image = f'<img style="max-width:100%" alt="{label}" src="data:image/png;base64,{data}">'
    return figure(image, f"{title}: {file.name}")


def figures(name: str, jobs: Sequence[Job]) -> str:
    """A table that the runs have written, over their seeds."""
    head, by_seed = list[str](), list[list[tables.Row]]()
    for job in jobs:
        if (job.folder / name).is_file():
            head, rows = tables.read(job.folder / name)
            head, parts = tables.split_by_seed(head, rows)
            by_seed += parts
    rows = tables.over_seeds(head, by_seed)
    content = grid(head, [list(map(html.escape, row)) for row in rows[:LONG]])
    several = f", mean (range) over {len(by_seed)} seeds" if len(by_seed) > 1 else ""
    cut = f", the first {LONG} of {len(rows)} rows" if len(rows) > LONG else ""
    caption = f"{name}{several}{cut}"
    return f"<p>{html.escape(caption)}</p>{content}" if len(rows) <= SHORT else details(caption, content)
