"""Runs studies: their cells, in this process or in several, then tables, curves, verdicts and the page.

The page has for every claim the published statement, its rule, figures, table and verdict.
"""

import base64
import dataclasses
import html
import itertools
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from polyformer.cli.plots.report.page import details, figure, page, section, tiles
from polyformer.core.errors import InputError
from polyformer.core.files import atomic_write, write_json
from polyformer.core.ops.tuning import processor
from polyformer.models.plugins import require_imported
from polyformer.training.metrics import LINES, Row, read_metrics, series
from polyformer.training.recipes import Recipe
from polyformer_lab.cells import Cell, cells_of, ordered, prepare
from polyformer_lab.comparison import (
    HEAD,
    VALIDATION,
    Curve,
    band_plot,
    caption,
    comparison_note,
    differences,
    mean_curves,
    validation_metric,
)
from polyformer_lab.machine import Sources, code_version, versions
from polyformer_lab.processes import LOG, Processes
from polyformer_lab.results import (
    MEANINGLESS,
    UNSHOWN,
    Results,
    Verdict,
    aligned,
    by_name,
    outcomes,
    results_of,
    write_csv,
    write_table,
)
from polyformer_lab.rules import check_metrics, check_rules, first_row_note
from polyformer_lab.study import Claim, Study

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


PRINTED = 20
"""The most comparisons that are printed."""

RECORD = "claim.json"
"""The settings of a study and the verdicts of its claims."""


@dataclasses.dataclass(eq=False)
class Running:
    """A study with its cells in the folder `out`. failures, problem: what went wrong, by cell and before.

    captions: of the figures, by the name of the file.
    """

    study: Study
    out: Path
    sources: Sources
    command: str
    cells: list[Cell] = dataclasses.field(default_factory=list)
    failures: dict[Cell, str] = dataclasses.field(default_factory=dict)
    problem: str = ""
    captions: dict[str, str] = dataclasses.field(default_factory=dict)

    def begin(self) -> None:
        """Prepare shared files, make the cells and check their recipes; nothing where data are missing."""
        if not self.sources.lacks:
            require_imported(self.study.base.get("imports"), "base.imports")
            check_rules(self.study)
            prepare(self.study, self.out, self.sources)
            cells = cells_of(self.study, self.out.absolute(), self.sources)
            recipes = [cell.recipe for cell in cells if cell.recipe is not None]
            for recipe in recipes:
                require_imported(recipe.get("imports"))
            for recipe in map(Recipe.from_dict, recipes):
                if recipe.model.pretrained is None:  # else the checkpoint may be that of another cell
                    recipe.model_config()
            check_metrics(self.study, cells)
            self.cells = cells

    @property
    def obstacle(self) -> str:
        """The reason why the study cannot run; "" for none."""
        return self.problem or (self.sources.lacks and f"needs {self.sources.lacks}")

    @property
    def waiting(self) -> list[Cell]:
        """The cells that are not finished."""
        return [cell for cell in self.cells if cell.rows() is None]

    @property
    def results(self) -> Results:
        """The rows of the finished cells."""
        return results_of(self.study, self.cells)


def run(studies: Sequence[Running], page: Path, jobs: int | None = None, quick: bool = False) -> Path:
    """Run what is not finished and write everything; return the path of the page.

    Args:
        studies: what to run.
        page: the file to write.
        jobs: processes at a time; None for one process, this one, for a single study.
        quick: whether figures mean nothing.

    Raises:
        SystemExit: with status 1, a cell has failed.
    """
    for each in studies:
        try:
            each.begin()
        except InputError as error:
            if len(studies) == 1:
                raise
            each.problem = str(error)  # of one study; the others run
        if each.obstacle:
            print(f"{each.study.name}: not run; {each.obstacle}")
    owners = {cell: each for each in studies for cell in each.cells}
    if jobs is None and len(studies) == 1:
        for number, cell in enumerate(itertools.chain.from_iterable(ordered(studies[0].cells))):
            print(f"{cell.title}: {_said(cell)}", flush=True)
            if number == 0 and (note := first_row_note(studies[0].study, studies[0].results.metrics)):
                print(note, flush=True)
    else:
        _in_processes(studies, owners, page, jobs or os.cpu_count() or 1, quick)
    for each in studies:
        if each.cells and not each.waiting:
            finish(each, quick)
    write_page(page, studies, quick)
    print(f"page: {page}")
    failed = [each.study.name for each in studies if each.problem]
    failed += [
        f"{owner.study.name}, {cell.title}" for cell, owner in owners.items() if cell in owner.failures
    ]
    if failed:
        print(f"failed: {'; '.join(failed)}; run the same command again to resume them")
        raise SystemExit(1)
    return page


def _said(cell: Cell) -> str:
    rows = cell.run()
    words = [f"{name} {value:.4g}" for name, value in rows[0].items() if isinstance(value, float)]
    return ", ".join(words[:4]) if len(rows) == 1 else f"{len(rows)} rows"


def _in_processes(
    studies: Sequence[Running], owners: Mapping[Cell, Running], page: Path, jobs: int, quick: bool
) -> None:
    def ended(cell: Cell, problem: str) -> None:
        owner = owners[cell]
        if problem:
            owner.failures[cell] = f"{problem} ({cell.folder / LOG})"
        print(f"{owner.study.name}, {cell.title}: {problem or 'done'}", flush=True)
        write_page(page, studies, quick)

    for alone, at_once in ((False, jobs), (True, 1)):
        processes = Processes(at_once)
        groups = [list(ordered(each.cells)) for each in studies if each.study.alone == alone]
        for parts in itertools.zip_longest(*groups, fillvalue=[]):
            left = [cell for part in parts for cell in part if cell.rows() is None]
            processes.run([cell for cell in left if all(need.rows() for need in cell.needs)], ended)


def finish(each: Running, quick: bool) -> None:
    """Write table, curve and verdicts of a study whose cells are finished, and print them."""
    study, results, out = each.study, each.results, each.out
    write_csv(results, out / f"{study.name}.csv")
    print("\n".join(aligned(results.table())))
    _compare(each, results)
    verdicts = by_name(results, study.claims)
    for verdict in verdicts.values():
        print(f"{MEANINGLESS * quick}{verdict.text}", flush=True)
    for claim, cell in results.absent.items():
        print(f"{claim}: no verdict, {cell} was not measured")
    _draw(each, results)
    settings = {**study.to_dict(), "claims": None}
    outcomes = {name: dataclasses.asdict(verdict) for name, verdict in verdicts.items()}
    write_json(out / RECORD, {"settings": settings, "verdicts": outcomes})


def _compare(each: Running, results: Results) -> None:
    """Write the differences between labels over equal seeds as a table, and print the first of them."""
    if compared := [own.line() for own in differences(results)]:
        write_table(HEAD, compared, each.out / f"{each.study.name}-differences.csv")
        print("\n".join(["", *aligned([HEAD, *compared[:PRINTED]])]))
        if len(compared) > PRINTED:
            print(f"and {len(compared) - PRINTED} more in {each.study.name}-differences.csv")
        print(f"{comparison_note(len(results.seeds))}\n")


def _draw(each: Running, results: Results) -> None:
    """Draw the plot that the study names, else the training loss, and the validation loss of its runs."""
    name, plot = each.study.name, each.study.plot
    figures = {}
    if plot is not None:
        figures[f"{name}.png"] = (results.curves(plot.x, plot.y), plot.x, plot.y, plot.log)
    logs = [(cell, read_metrics(cell.folder)) for cell in each.cells if (cell.folder / LINES).is_file()]
    metric = validation_metric(row for _, rows in logs for row in rows)
    if metric is not None:
        label = f"validation {metric.removeprefix(VALIDATION)}"
        figures[f"{name}-validation.png"] = (_series(each, logs, metric), "step", label, False)
    if plot is None:
        figures[f"{name}.png"] = (_series(each, logs, "loss"), "step", "training loss", False)
    for file, (curves, x, y, log) in figures.items():
        if any(curves.values()):
            band_plot(each.out / file, curves, x, y, log)
            each.captions[file] = f"{y} by {x}: {caption(curves)}"


def _series(each: Running, logs: Sequence[tuple[Cell, list[Row]]], metric: str) -> dict[str, Curve]:
    """Return a metric of the logs by step, a curve for each combination of labels."""
    return mean_curves(
        (", ".join(cell.labels) or each.study.name, step, value)
        for cell, rows in logs
        for step, value in zip(*series(rows, metric))
    )


def opened(
    study: Study, out: Path, root: str | None, named: Mapping[str, str | None], command: str
) -> Running:
    """Return a study with its sources.

    Raises:
        InputError: a source of another study is named, or a named place does not exist.
    """
    strange = [name for name, path in named.items() if path is not None and name not in study.needs]
    if strange:
        expected = ", ".join(study.needs) or "none"
        raise InputError(f"--{strange[0]}: {study.name} does not read it; its sources: {expected}")
    return Running(study, out, Sources(study.needs, root, named), command)
