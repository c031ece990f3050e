"""Generate the survey: a map and a table of the papers behind the members, by year and axis."""

import html
import re
from collections import defaultdict
from typing import NamedTuple

from lineage import EDGES, NAMES
from member_pages import path, title

from polyformer.cli.documentation import Member, members

PAPER = re.compile(r"([A-Z][\w-]+(?: et al\.| and [A-Z][\w-]+)?) (\d{4})(?: \(([^)]+)\))?")

LANES = {
    "Positions": ("Position", "RopeExtension"),
    "Sparse patterns": ("Pattern",),
    "Other attention": ("Mechanism",),
    "Memory": ("Memory", "Trunk"),
    "Depth": ("Depth", "ExitRule"),
    "Layers": ("FeedForward", "Block", "Norm"),
    "Heads and tasks": ("Head", "Drafting", "Task"),
    "Training": ("Optimizer", "Schedule"),
}
"""The rows of the map from top to bottom, with their axes. Other axes are in the last row."""

CHIEF = (
    "Mechanism",
    "Pattern",
    "Memory",
    "Depth",
    "ExitRule",
    "Position",
    "RopeExtension",
    "FeedForward",
    "Block",
)

WIDTH, HEIGHT, COLUMN, LEFT, TOP = 112, 30, 124, 132, 34
COLOURS = "#1f5a8c", "#2f7f5f", "#8a4fa3", "#b4561c", "#5c6b1f", "#55606b", "#9a3b4f", "#3d6f8e"


class Paper(NamedTuple):
    """A paper, identified by authors and year, and its members."""

    key: str
    year: int
    members: tuple[Member, ...]

    @property
    def name(self) -> str:
        """Return the short name of the paper, or the name of its first author."""
        return NAMES.get(self.key, self.key.split()[0])


def papers() -> list[Paper]:
    """Return all papers that are sources of registered members, by year."""
    sources: dict[str, list[Member]] = defaultdict(list)
    for member in members():
        for author, year, _ in PAPER.findall(member.cls.paper):
            if member not in sources[f"{author} {year}"]:
                sources[f"{author} {year}"].append(member)
    rows = [Paper(key, int(key.split()[-1]), tuple(mine)) for key, mine in sources.items()]
    return sorted(rows, key=lambda paper: (paper.year, paper.key))


def chief(paper: Paper) -> Member:
    """Return the main member of a paper: attention before memory, positions, layers and tasks."""
    return min(
        paper.members, key=lambda member: CHIEF.index(member.axis) if member.axis in CHIEF else len(CHIEF)
    )


def lane(paper: Paper) -> int:
    """Return the row of the paper's main member in the map."""
    axes, axis = list(LANES.values()), chief(paper).axis
    return next((i for i, lane_axes in enumerate(axes) if axis in lane_axes), len(axes) - 1)


def places(rows: list[Paper]) -> tuple[dict[str, tuple[float, float]], list[float], float]:
    """Return the position of each paper, the top of each lane, and the height of the map."""
    years = sorted({paper.year for paper in rows})
    place: dict[str, tuple[float, float]] = {}
    tops, top = [], float(TOP)
    for index in range(len(LANES)):
        tops.append(top)
        stack: dict[int, int] = defaultdict(int)
        for paper in (paper for paper in rows if lane(paper) == index):
            x = LEFT + years.index(paper.year) * COLUMN
            place[paper.key] = (x, top + 8 + stack[paper.year] * (HEIGHT + 8))
            stack[paper.year] += 1
        top += max([*stack.values(), 1]) * (HEIGHT + 8) + 14
    return place, tops, top


def drawing(rows: list[Paper]) -> str:
    """Return the map as SVG: years across, axes down, arrows from a paper to its successors."""
    place, tops, height = places(rows)
    years = sorted({paper.year for paper in rows})
    width = LEFT + len(years) * COLUMN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" role="img" '
        f'font-family="sans-serif" aria-label="Papers by year and axis, and what they led to">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" '
        'orient="auto"><path d="M0 0L8 4L0 8z" fill="#8a949e"/></marker></defs>',
    ]
    for index, (name, top) in enumerate(zip(LANES, tops)):
        bottom = tops[index + 1] if index + 1 < len(tops) else height
        shade = "#f4f7fa" if index % 2 == 0 else "#ffffff"
        parts.append(f'<rect x="0" y="{top}" width="{width}" height="{bottom - top}" fill="{shade}"/>')
        parts.append(
            f'<text x="10" y="{top + 27}" font-size="13" font-weight="bold" fill="{COLOURS[index]}">'
            f"{name}</text>"
        )
    for index, year in enumerate(years):
        x = LEFT + index * COLUMN + WIDTH / 2
        parts.append(f'<text x="{x}" y="22" font-size="14" fill="#444" text-anchor="middle">{year}</text>')
    for earlier, later in EDGES:
        if earlier in place and later in place:
            parts.append(_arrow(place[earlier], place[later]))
    parts += [_box(paper, *place[paper.key]) for paper in rows]
    return "\n".join([*parts, "</svg>"])


def _arrow(start: tuple[float, float], stop: tuple[float, float]) -> str:
    x, y = start[0] + WIDTH, start[1] + HEIGHT / 2
    end_x, end_y = stop[0], stop[1] + HEIGHT / 2
    if stop[0] == start[0]:  # same year: from below or above
        x = end_x = start[0] + WIDTH / 2
        y, end_y = (start[1] + HEIGHT, stop[1]) if stop[1] > start[1] else (start[1], stop[1] + HEIGHT)
        curve = f"C{x} {(y + end_y) / 2} {end_x} {(y + end_y) / 2} {end_x} {end_y}"
    else:
        bend = max(24.0, (end_x - x) / 2)
        curve = f"C{x + bend:.0f} {y} {end_x - bend:.0f} {end_y} {end_x} {end_y}"
    return (
        f'<path d="M{x} {y}{curve}" fill="none" stroke="#b9c2ca" stroke-width="1.2" marker-end="url(#tip)"/>'
    )


def _box(paper: Paper, x: float, y: float) -> str:
    member = chief(paper)
    target = path(member.axis, member.name).replace(".md", ".html")
    names = ", ".join(member.name for member in paper.members)
    size = 12 if len(paper.name) < 15 else 10
    return (
        f'<a href="{target}"><title>{html.escape(paper.key)}: {html.escape(names)}</title>'
        f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="5" fill="#fff" '
        f'stroke="{COLOURS[lane(paper)]}" stroke-width="1.4"/>'
        f'<text x="{x + WIDTH / 2}" y="{y + 19}" font-size="{size}" fill="#1d2733" text-anchor="middle">'
        f"{html.escape(paper.name)}</text></a>"
    )


def table(rows: list[Paper]) -> str:
    """Return the table of all papers with their members."""
    lines = ["| year | paper | known as | members |", "|---|---|---|---|"]
    for paper in rows:
        links = ", ".join(f"[{title(member)}]({path(member.axis, member.name)})" for member in paper.members)
        authors = paper.key.rpartition(" ")[0]
        name = paper.name if paper.key in NAMES else ""
        lines.append(f"| {paper.year} | {authors} | {name} | {links} |")
    return "\n".join(lines)


def page() -> str:
    """Return the page with the map and the table."""
    rows = papers()
    intro = (
        "The papers behind the members. Years run to the right, axes from top to bottom. An arrow points "
        "from a paper to a paper that builds on it. All papers build on the Transformer of 2017; only its "
        "first arrows are drawn. A box links to its member. Generated from the sources of the members."
    )
    count = f"{len(rows)} papers, {len({(m.axis, m.name) for paper in rows for m in paper.members})} members."
    drawn = f'<div class="map">\n{drawing(rows)}\n</div>'
    return "\n\n".join(["# The survey as a map", intro, drawn, count, table(rows)]) + "\n"
