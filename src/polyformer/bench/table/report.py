"""What was measured, as a table: Markdown, which reads as plain text too."""

from collections.abc import Iterator

from polyformer.bench.table.measuring import SPEED
from polyformer.bench.table.records import Comparison, MeasuredCase, Record, Table
from polyformer.bench.table.rows import ROWS

HEAD = ("work", "ours", "beside", "its time", "ratio", "asked", "")


def markdown(table: Table) -> str:
    """The machine, and a table for each instruction set."""
    machine = table.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    lines = [
        f"{machine.processor}, {machine.cores} cores, {machine.threads} threads; {versions}.",
        "",
        "Times are medians of rounds in which all ran in turn, in one process; ratios are theirs over ours.",
    ]
    if machine.quick:
        lines += ["", "Measured with --quick: tiny sizes, which say that it runs and nothing of speed."]
    for instructions in dict.fromkeys(record.instructions for record in table.records):
        records = [record for record in table.records if record.instructions == instructions]
        lines += ["", *_section(instructions, records)]
    return "\n".join(lines)


def _section(instructions: str, records: list[Record]) -> Iterator[str]:
    used = next((record.vectors for record in records if record.vectors), "")
    dates = sorted(record.date[:10] for record in records)
    span = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    yield f"**{instructions}** ({used}), {span}"
    yield ""
    rows = [HEAD, *(cells for record in sorted(records, key=_order) for cells in _rows(record))]
    widths = [max(len(cells[column]) for cells in rows) for column in range(len(HEAD))]
    for index, cells in enumerate(rows):
        yield "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths)) + " |"
        if index == 0:
            yield "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    for record in records:
        for name, why in record.absent.items():
            yield f"\n{record.row}: without {name}: {why}"


def _order(record: Record) -> int:
    return list(ROWS).index(record.row) if record.row in ROWS else len(ROWS)


def _rows(record: Record) -> Iterator[tuple[str, ...]]:
    what = ROWS[record.row].what if record.row in ROWS else record.row
    if record.failure is not None:
        yield what, "", "", "", "", "", f"failed: {record.failure}"
        return
    for comparison in record.comparisons:
        yield _cells(what, comparison, record)


def _cells(what: str, comparison: Comparison, record: Record) -> tuple[str, ...]:
    case = next(case for case in record.cases if case.name == comparison.case)
    name = f"{what}; the worst: {case.name}" if case.name else what
    own = time(case, comparison.ours)
    if comparison.ours != "polyformer":
        own = f"{own} ({comparison.ours.removeprefix('polyformer-')})"
    if comparison.peer == SPEED:
        theirs = f"{(case.peak or 0) / 1e9:.0f} GFLOP/s"
    else:
        theirs = time(case, comparison.peer)
    asked = "" if comparison.asked is None else f"{comparison.asked:g}"
    verdict = comparison.verdict
    return name, own, comparison.peer, theirs, f"{comparison.ratio:.2f}", asked, verdict


def time(case: MeasuredCase, contender: str) -> str:
    """A contender's median with its unit."""
    median = case.seconds[contender].median
    if median >= 10:
        return f"{median:.1f} s"
    if median >= 1e-3:
        return f"{median * 1e3:.{0 if median >= 0.1 else 1}f} ms"
    return f"{median * 1e6:.1f} us"
