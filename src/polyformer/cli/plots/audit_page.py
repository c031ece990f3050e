"""The report of an audit as one HTML page."""

from polyformer.applications.audit import LABELS, Report, Result, Status
from polyformer.cli.plots.report.page import page, section, table, tiles

COLUMNS: dict[Status, tuple[str, ...]] = {
    "finding": ("side", "what was found", "smallest input", "repeat it by"),
    "accepted": ("side", "deviation and reason"),
    "not applicable": ("side", "reason"),
    "passed": ("side", "relative difference", "rounding explains"),
}


def audit_page(report: Report) -> str:
    """Return the document: findings first, then accepted deviations and the other checks."""
    counts = [(name.capitalize(), str(len(report.of(status))), "checks") for status, name in LABELS.items()]
    sections = [section("Summary", "Checks by their result.", tiles(counts))]
    for status, columns in COLUMNS.items():
        rows = {result.name: _cells(result) for result in report.results if result.status == status}
        if rows:
            name = LABELS[status].capitalize()
            sections.append(section(name, f"{len(rows)} checks.", table("", columns, rows)))
    return page(f"Audit of {report.model}", report.summary, sections)


def _cells(result: Result) -> tuple[str, ...]:
    if result.status == "passed":
        return result.side, f"{result.figure:.1e}", f"{result.limit:.1e}"
    return result.side, result.sentence, *result.repetition
