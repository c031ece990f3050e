"""Runs studies: their cells, in this process or in several, then tables, curves, verdicts and the page."""

import dataclasses
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from polyformer.core.errors import InputError
from polyformer.core.files import write_json
from polyformer.models.plugins import require_imported
from polyformer.training.metrics import LINES, Row, read_metrics, series
from polyformer.training.recipes import Recipe
from polyformer_lab.cells import Cell, cells_of, ordered, prepare
from polyformer_lab.comparison import HEAD, comparison_note, differences
from polyformer_lab.curves import VALIDATION, Curve, mean_curves, validation_metric
from polyformer_lab.evidence import check_rules
from polyformer_lab.names import check_metrics, first_row_note
from polyformer_lab.page import write_page
from polyformer_lab.plot import band_plot, caption
from polyformer_lab.processes import LOG, Processes
from polyformer_lab.results import (
    MEANINGLESS,
    Results,
    aligned,
    by_name,
    results_of,
    write_csv,
    write_table,
)
from polyformer_lab.sources import Sources
from polyformer_lab.study import Study

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
