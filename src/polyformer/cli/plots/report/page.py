"""The page around the sections of a report, and its charts as SVG.

The page is one file, with its style and its script inside. Lines and bars have colours from the page's style
and a title on every point.

The reliability diagram of a classifier has its accuracy by the probability of its predicted label. The growth
of the cost of attention with the length of the text is measured on this machine in seconds.
"""

import dataclasses
import html
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.resources import files
from typing import Any

import torch

from polyformer.attention.functional.attend import attend
from polyformer.attention.patterns import Window
from polyformer.attention.patterns.base import Pattern
from polyformer.attention.patterns.implied import Causal
from polyformer.core.measuring import time_interleaved
from polyformer.training.recipes.report import number
from polyformer.training.recipes.run import Run

FOOTER = "Written by polyformer. The page is one file and loads nothing from elsewhere."


def page(title: str, subtitle: str, sections: Sequence[str], script: str = "") -> str:
    """Return a whole document. `sections` are HTML, all else is text; `script` is JavaScript run last."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>\n{asset('style.css')}</style>\n</head>\n<body>\n"
        f'<header><h1>{html.escape(title)}</h1><p class="soft">{html.escape(subtitle)}</p></header>\n'
        f"<main>\n{chr(10).join(sections)}\n</main>\n<footer><p>{FOOTER}</p></footer>\n"
        f"{''.join(f'<script>{each}</script>' for each in (script, save_buttons()) if each)}\n"
        "</body>\n</html>\n"
    )


def save_buttons() -> str:
    """Return the script that adds a button to each figure, which saves it as a file."""
    return (files("polyformer.cli.plots.explorer") / "figures.js").read_text(encoding="utf-8")


def asset(name: str) -> str:
    """Return the text of a file next to this module."""
    return (files("polyformer.cli.plots.report") / name).read_text(encoding="utf-8")


def section(title: str, text: str, *parts: str) -> str:
    """Return a section: a heading, a sentence that explains the content, and parts of HTML."""
    name = title.lower().replace(" ", "-")
    heading = f'<h2 id="{name}">{html.escape(title)}</h2>\n<p class="soft">{html.escape(text)}</p>'
    return f'<section aria-labelledby="{name}">\n{heading}\n{chr(10).join(parts)}\n</section>'


def tiles(facts: Sequence[tuple[str, str, str]]) -> str:
    """Return large numbers side by side: a name, a number and a remark each."""
    cells = (
        f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(number)}<small>{html.escape(remark)}</small></dd></div>"
        for name, number, remark in facts
    )
    return f'<dl class="tiles">{"".join(cells)}</dl>'


def table(caption: str, columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> str:
    """Return a table of rows of cells, each row headed by its name."""
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in ("", *columns))
    body = "".join(
        f'<tr><th scope="row">{html.escape(name)}</th>'
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
        + "</tr>\n"
        for name, cells in rows.items()
    )
    text = f'<caption class="soft">{html.escape(caption)}</caption>' if caption else ""
    content = f"{text}<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>"
    return f'<div class="wide"><table>{content}</table></div>'


def figure(content: str, caption: str = "", name: str = "") -> str:
    """Return a picture with a caption."""
    text = f"<figcaption>{html.escape(caption)}</figcaption>" if caption else ""
    return f"<figure{f' class={chr(34)}{name}{chr(34)}' if name else ''}>{content}{text}</figure>"


def details(summary: str, content: str) -> str:
    """Return content that is opened by a click or a key."""
    return f"<details><summary>{html.escape(summary)}</summary>\n{content}\n</details>"


WIDTH, HEIGHT = 720, 340
LEFT, RIGHT, TOP, BOTTOM = 64, 20, 16, 48
"""Margins of a line chart, in pixels."""

MARKED = 40
"""The most points of a line that shows each point as a dot."""


@dataclasses.dataclass(frozen=True)
class Series:
    """A line through `points` (x, y); `level`: a reference, drawn dashed over the whole width at one y."""

    name: str
    points: Sequence[tuple[float, float]]
    level: bool = False


@dataclasses.dataclass(frozen=True)
class Scale:
    """A map of values from `low` to `high` onto pixels from `start` to `stop`, linear or logarithmic."""

    low: float
    high: float
    start: float
    stop: float
    log: bool

    def __call__(self, value: float) -> float:
        """Return the pixel of a value."""
        low, high, value = map(math.log if self.log else float, (self.low, self.high, value))
        return self.start + (value - low) / ((high - low) or 1.0) * (self.stop - self.start)

    def ticks(self) -> list[float]:
        """Return round values within the scale: powers of two, or steps of 1, 2 or 5 times a power of ten."""
        if self.log:
            first, last = math.ceil(math.log2(self.low) - 1e-9), math.floor(math.log2(self.high) + 1e-9)
            step = max(1, -(-(last - first + 1) // 8))
            return [2.0**power for power in range(first, last + 1, step)]
        rough = (self.high - self.low) / 5 or 1.0
        unit = 10 ** math.floor(math.log10(rough))
        step = next(unit * size for size in (1, 2, 5, 10) if unit * size >= rough)
        return [step * n for n in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]


def line_chart(
    label: str,
    series: Sequence[Series],
    x_name: str,
    y_name: str,
    log: bool = False,
    text: Callable[[float], str] = "{:.4g}".format,
) -> str:
    """Return the chart as an `<svg>` that `label` describes; with `log`, both axes are logarithmic."""
    drawn = [line for line in series if line.points]
    x_values = [x for line in drawn if not line.level for x, _ in line.points] or [0.0, 1.0]
    y_values = [y for line in drawn for _, y in line.points] or [0.0, 1.0]
    low, high = min(y_values), max(y_values)
    room = 0.0 if log else 0.06 * (high - low)
    x = Scale(min(x_values), max(x_values), LEFT, WIDTH - RIGHT, log)
    y = Scale(low - room, high + room, HEIGHT - BOTTOM, TOP, log)
    parts = [*_axes(x, y, x_name, y_name, text)]
    parts += [_line(index, line, x, y, text) for index, line in enumerate(drawn)]
    legend = "".join(
        f'<li class="s{index}{" level" if line.level else ""}">{html.escape(line.name)}</li>'
        for index, line in enumerate(drawn)
    )
    return f'{svg(label, WIDTH, HEIGHT, parts)}\n<ul class="legend">{legend}</ul>'


def bar_chart(label: str, bars: Sequence[tuple[str, float]], text: Callable[[float], str]) -> str:
    """Return horizontal bars from 0, each between its name and its value; the last is highlighted."""
    greatest = max(value for _, value in bars) or 1.0
    parts = []
    for index, (name, value) in enumerate(bars):
        top, width = 8 + 34 * index, 400 * value / greatest
        kind = "bar own" if index + 1 == len(bars) else "bar"
        parts.append(
            f'<text class="name" x="200" y="{top + 17}">{html.escape(name)}</text>'
            f'<rect class="{kind}" x="212" y="{top}" width="{width:.1f}" height="24" rx="4"/>'
            f'<text x="{220 + width:.1f}" y="{top + 17}">{text(value)}</text>'
        )
    return svg(label, WIDTH, 8 + 34 * len(bars), parts)


def svg(label: str, width: int, height: int, parts: Sequence[str]) -> str:
    """Return an image with a description, as wide as the page allows."""
    return (
        f'<svg class="chart" role="img" aria-label="{html.escape(label)}" viewBox="0 0 {width} {height}">'
        f"{''.join(parts)}</svg>"
    )


def _axes(x: Scale, y: Scale, x_name: str, y_name: str, text: Callable[[float], str]) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = [f'<path class="axis" d="M{LEFT} {TOP}V{bottom}H{right}"/>']
    for value in y.ticks():
        parts.append(
            f'<path class="grid" d="M{LEFT} {y(value):.1f}H{right}"/>'
            f'<text class="y" x="{LEFT - 8}" y="{y(value) + 4:.1f}">{text(value)}</text>'
        )
    parts += [
        f'<text class="x" x="{x(value):.1f}" y="{bottom + 18}">{value:,.0f}</text>' for value in x.ticks()
    ]
    middle = (TOP + bottom) / 2
    parts.append(
        f'<text class="x title" x="{(LEFT + right) / 2}" y="{HEIGHT - 8}">{html.escape(x_name)}</text>'
    )
    parts.append(
        f'<text class="x title" transform="translate(14 {middle}) rotate(-90)">{html.escape(y_name)}</text>'
    )
    return parts


def _line(index: int, line: Series, x: Scale, y: Scale, text: Callable[[float], str]) -> str:
    """Return a line with its dots, which show their values to a pointer."""
    if line.level:
        height, title = y(line.points[0][1]), f"{line.name}: {text(line.points[0][1])}"
        path = f'<path class="s{index} level" d="M{LEFT} {height:.1f}H{WIDTH - RIGHT}">'
        return f"{path}<title>{html.escape(title)}</title></path>"
    places = [(x(a), y(b), f"{line.name}: {text(b)} at {a:,.0f}") for a, b in line.points]
    data = " ".join(f"{left:.1f},{top:.1f}" for left, top, _ in places)
    size = 3.5 if len(places) <= MARKED else 2
    dots = "".join(
        f'<circle cx="{left:.1f}" cy="{top:.1f}" r="{size}"><title>{html.escape(title)}</title></circle>'
        for left, top, title in places
    )
    return f'<g class="s{index}"><polyline points="{data}"/>{dots}</g>'


def reliability(run: Run) -> str:
    """Return the section of a run with a record of its calibration; "" for other runs."""
    record: dict[str, Any] | None = run.facts.get("calibration")
    if not record:
        return ""
    changed = record["temperature"] != 1
    sides = {"before": record["before"], "after": record["after"]} if changed else {"model": record["before"]}
    lines = [Series(name, percent(side["bins"])) for name, side in sides.items()]
    lines.append(Series("perfectly calibrated", [(0.0, 0.0), (100.0, 100.0)]))
    cells = {name: [number(side["nll"]), number(side["calibration_error"])] for name, side in sides.items()}
    errors = ", ".join(f"{name} {values[1]}" for name, values in cells.items())
    label = f"accuracy by probability of the predicted label; expected calibration error: {errors}"
    rows = sum(count for _, _, count in record["before"]["bins"])
    result = (
        f"Logits are divided by {number(record['temperature'])}, the temperature with the lowest negative "
        "log-likelihood on these rows. No predicted label changes."
        if changed
        else "No temperature lowers the negative log-likelihood on these rows; the logits are unchanged."
    )
    text = (
        f"{rows:,} rows of the validation data, in {len(record['before']['bins'])} bins. Of the labels that "
        f"are predicted with a probability of 80 %, 80 % are right if the model is calibrated. {result}"
    )
    chart = line_chart(label, lines, "probability of the predicted label (%)", "accuracy (%)")
    columns = ["negative log-likelihood (nats)", "expected calibration error"]
    return section("Calibration", text, figure(chart), table("", columns, cells))


def percent(bins: list[tuple[float, float, int]]) -> list[tuple[float, float]]:
    """Return mean probability and accuracy of each bin in per cent."""
    return [(100 * sure, 100 * right) for sure, right, _ in bins]


LENGTHS = (256, 512, 1024, 2048, 4096)
WINDOW, HEADS, HEAD_SIZE = 128, 4, 64
REPEATS = 3


@dataclasses.dataclass(frozen=True)
class Growth:
    """The growth of one pattern, by length: milliseconds of a forward pass, and number of allowed scores."""

    name: str
    lengths: tuple[int, ...]
    milliseconds: tuple[float, ...]
    scores: tuple[int, ...]


def measure_growth(lengths: Sequence[int] = LENGTHS, repeats: int = REPEATS) -> list[Growth]:
    """Measure causal attention to all tokens before, and to the last `WINDOW` of them: the fastest of
    `repeats` runs.

    float32, one text, `HEADS` heads of `HEAD_SIZE`. The two are measured in turn at every length.
    """
    patterns: dict[str, Pattern] = {"dense": Causal(), f"window of {WINDOW}": Window(WINDOW - 1, 0)}
    times: dict[str, list[float]] = {name: [] for name in patterns}
    for length in lengths:
        q, k, v = torch.randn(3, 1, HEADS, length, HEAD_SIZE, generator=torch.Generator().manual_seed(0))
        calls = {name: partial(attend, q, k, v, pattern=pattern) for name, pattern in patterns.items()}
        for name, seconds in time_interleaved(calls, repeats).items():
            times[name].append(1000 * min(seconds))
    scores = [[sum(min(i + 1, most) for i in range(n)) for n in lengths] for most in (max(lengths), WINDOW)]
    return [
        Growth(name, tuple(lengths), tuple(times[name]), tuple(own)) for name, own in zip(patterns, scores)
    ]
