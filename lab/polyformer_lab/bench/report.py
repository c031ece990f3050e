"""Files of `polyformer bench WHAT --out FILE`, as tables in Markdown, several files in turn.

polyformer bench report --files mine.json theirs.json
"""

import dataclasses
from collections.abc import Iterable, Iterator

from polyformer.core.config import Config
from polyformer_lab.bench.measuring import time
from polyformer_lab.bench.records import Comparison, Record, Table
from polyformer_lab.bench.rows import OURS, SPEED

HEAD = ("work", "ours", "beside", "its time", "ratio", "asked", "")
TIMES = ("work", "contender", "median", "fastest")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportBench(Config):
    """The settings of the report; it measures nothing."""

    files: tuple[str, ...]


def run(config: ReportBench) -> str:
    """Print and return the tables."""
    text = "\n\n".join(markdown(Table.load(file)) for file in config.files)
    print(text)
    return text


def markdown(table: Table) -> str:
    """Return the machine, and for each instruction set a table of comparisons and a table of times."""
    machine, versions = table.machine, ", ".join(f"{name} {each}" for name, each in table.versions.items())
    lines = [
        f"{machine['processor']}, {machine['cores']} cores, {machine['threads']} threads; {versions}.",
        "",
        "Times are medians of rounds in which all ran in turn, in one process; ratios are theirs over ours.",
    ]
    if table.settings.get("quick"):
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
    failed = ((each.what, *[""] * 5, f"failed: {each.failure}") for each in records if each.failure)
    comparisons = (_cells(each, record) for record in records for each in record.comparisons)
    yield from _columns([HEAD, *comparisons, *failed])
    yield from _columns([*_times(records)])
    for record in records:
        for name, why in record.absent.items():
            yield f"\n{record.row}: without {name}: {why}"


def _columns(rows: list[tuple[str, ...]]) -> Iterator[str]:
    """Yield the lines of a table in Markdown with aligned columns; none for a header without rows."""
    if len(rows) < 2:
        return
    yield ""
    rows = [tuple(cell.replace("|", r"\|") for cell in cells) for cells in rows]
    widths = [max(map(len, column)) for column in zip(*rows)]
    for index, cells in enumerate(rows):
        yield "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths)) + " |"
        if index == 0:
            yield "|" + "|".join("-" * (width + 2) for width in widths) + "|"


def _cells(comparison: Comparison, record: Record) -> tuple[str, ...]:
    case = next(case for case in record.cases if case.name == comparison.case)
    worst = "the worst: " if comparison.worst_of > 1 else ""
    own = time(case.seconds[comparison.ours].median)
    if comparison.ours != OURS:
        own = f"{own} ({comparison.ours.removeprefix(f'{OURS}-')})"
    speed = f"{(case.peak or 0) / 1e9:.0f} GFLOP/s"
    theirs = speed if comparison.peer == SPEED else time(case.seconds[comparison.peer].median)
    asked = "" if comparison.asked is None else f"{comparison.asked:g}"
    what = "; ".join(filter(None, (record.what, f"{worst}{case.name}")))
    return what, own, comparison.peer, theirs, f"{comparison.ratio:.2f}", asked, comparison.verdict


def _times(records: Iterable[Record]) -> Iterator[tuple[str, ...]]:
    """Yield every contender's times and figures, without the rows that report only their worst case."""
    shown = [each for each in records if all(pair.worst_of == 1 for pair in each.comparisons)]
    facts = dict.fromkeys(
        fact for each in shown for case in each.cases for known in case.facts.values() for fact in known
    )
    yield *TIMES, *facts
    for record in shown:
        for case in record.cases:
            for name, seconds in case.seconds.items():
                known = case.facts.get(name, {})
                figures = (f"{known[fact]:.4g}" if fact in known else "" for fact in facts)
                work = "; ".join(filter(None, (record.what, case.name)))
                yield work, name, time(seconds.median), time(seconds.fastest), *figures
