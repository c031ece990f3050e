"""The table as Markdown, and as CSV."""

from collections.abc import Iterable, Iterator, Sequence

from polyformer.bench.reproduce.members.listing import Row
from polyformer.bench.reproduce.members.verdict import Line

TITLES = {
    "decoder": "Decoders on a book",
    "encoder": "Encoders on a book",
    "image": "Images of digits, pixel by pixel",
}

COSTS = "MiB", "slope"

CSV = (
    *("table", "family", "member", "verdict", "seeds", "closed_least", "closed_most"),
    *("asked", "right", "right_spread", "nats", "nats_spread", "ms_a_step", *COSTS),
)


def markdown(lines: Sequence[Line], refused: dict[str, str], absent: dict[str, str]) -> str:
    """All tables, and the members that are in none with the reason."""
    parts = []
    for table, title in TITLES.items():
        rows = [line for line in lines if line.row.table == table]
        if rows:
            kinds = list(rows[0].right)
            measure = (
                [f"{kind}, right" for kind in kinds if kind != "text"] + ["text, nats"]
                if "text" in kinds
                else ["pixel, nats"]
            )
            head = ["member", *measure, "of the way to dense", "verdict", "seeds", "ms", *COSTS]
            cells = [_cells(line) for line in rows]
            if all(not any(row[-len(COSTS) :]) for row in cells):  # not measured
                head, cells = head[: -len(COSTS)], [row[: -len(COSTS)] for row in cells]
            parts += [f"### {title}", "", *_table(head, cells), ""]
    reasons = [f"- `{name}`: {reason}" for name, reason in {**absent, **refused}.items()]
    if reasons:
        parts += ["Not in the tables:", "", *reasons, ""]
    return "\n".join(parts)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|---|{'---:|' * (len(head) - 1)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _cells(line: Line) -> list[str]:
    if line.row.table == "image":
        measured = ["{:.3f} ± {:.3f}".format(*line.nats["pixel"])]
    else:
        shares = (tuple(100 * value for value in line.right[kind]) for kind in ("recall", "back"))
        measured = ["{:.1f}% ± {:.1f}".format(*share) for share in shares]
        measured.append("{:.2f} ± {:.2f}".format(*line.nats["text"]))
    closed = "" if line.closed is None else "{:.2f} to {:.2f}".format(*line.closed)
    name = line.member.replace("|", "\\|")
    return [
        f"{line.row.family} `{name}`",
        *measured,
        closed,
        line.verdict,
        str(line.seeds),
        f"{line.milliseconds:.0f}",
        "" if line.mebibytes is None else f"{line.mebibytes:.0f}",
        "" if line.slope is None else f"{line.slope:.2f}",
    ]


def values(line: Line) -> list[object]:
    """The line as a row of the CSV file, by `CSV`."""
    row: Row = line.row
    closed = line.closed or ("", "")
    measured = *line.right[row.asks], *line.nats[row.asks]
    costs = line.milliseconds, line.mebibytes, line.slope
    return [
        row.table,
        row.family,
        line.member,
        line.verdict,
        line.seeds,
        *closed,
        row.asks,
        *measured,
        *costs,
    ]
