"""The validation rows that examples are taken from, and the examples of tasks that predict one label.

A rule chooses among the rows, and the page states it. A task with labels has a confusion matrix and the most
certain wrong answers.
"""

import base64
import dataclasses
import html
import struct
import zlib
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np

from polyformer.cli.plots.report.page import details, figure, section, table
from polyformer.data import load
from polyformer.training.recipes.run import Run
from polyformer.training.tasks import ImageClassification
from polyformer.training.tasks.text import STREAMED_ROWS

GENERATED = 100
"""The most rows for which a model generates, tags or answers, so that a report takes seconds."""

SHOWN = 4
"""The examples in each of the groups best, typical and worst."""


@dataclasses.dataclass(frozen=True, eq=False)
class HeldOutRows:
    """The validation `rows` of a run with its task and model (in evaluation mode, on a CPU).

    scores: the metrics of the validation data in run.json. seed: the seed of the run, for sampling.
    """

    task: Any
    model: Any
    rows: list[Any]
    scores: dict[str, float]
    seed: int

    @property
    def first(self) -> list[Any]:
        """The first `GENERATED` rows."""
        return self.rows[:GENERATED]

    @property
    def extent(self) -> str:
        """The part of the data that `first` is, in words."""
        count = len(self.rows)
        return f"the first {GENERATED} of {count:,}" if count > GENERATED else f"{count:,}"


def read_held_out(run: Run, model: Any) -> HeldOutRows:
    """Return the validation rows of `run`; of streamed rows the first. There may be none.

    Raises `InputError` if the data cannot be read any more.
    """
    task = run.recipe.task
    rows = (task.own_data or load(run.recipe.data, task.needs)).validation
    kept = [] if rows is None else list(rows if hasattr(rows, "__len__") else islice(rows, STREAMED_ROWS))
    scores = run.facts.get("metrics", {}).get("validation", {})
    return HeldOutRows(run.task, model, kept, scores, run.recipe.seed)


def ranked(scores: Sequence[float]) -> dict[str, list[int]]:
    """Return the numbers of the examples by group: `SHOWN` highest, around the median, and lowest.

    Equal scores keep the order of the rows. Few examples are one group.
    """
    order = sorted(range(len(scores)), key=lambda number: -scores[number])
    if len(order) <= 3 * SHOWN:
        return {"All, the best first": order}
    middle = (len(order) - SHOWN) // 2
    return {
        "Best": order[:SHOWN],
        "Typical": order[middle : middle + SHOWN],
        "Worst": order[-SHOWN:],
    }


def rule(score: str) -> str:
    """Return how `ranked` chooses by `score`, for readers."""
    return (
        f"Shown are the {SHOWN} with the highest {score}, the {SHOWN} around the median and the {SHOWN} with "
        "the lowest; rows with equal scores in the order of the data."
    )


MATRIX = 30
"""The most labels of a confusion matrix; with more labels, the most frequent mistakes are listed."""

PAIRS, CERTAIN = 20, 12
"""The number of frequent mistakes that are listed, and of single rows that are shown of each kind."""


def mistakes(held: HeldOutRows) -> str:
    """Return the confusion matrix, the most certain wrong answers, and the least certain right ones."""
    task, rows = held.task, held.rows
    shares = task.probabilities(held.model, rows).numpy()
    truth = np.array([task.metrics.labels.number_of_row(row) for row in rows])
    guesses = shares.argmax(1)
    counts = confusion(truth, guesses, len(task.labels))
    parts = [matrix(counts, task.labels) if len(task.labels) <= MATRIX else frequent(counts, task.labels)]
    certainty = shares[np.arange(len(rows)), guesses]
    wrong, right = np.flatnonzero(guesses != truth), np.flatnonzero(guesses == truth)
    chosen = {
        "Most surely wrong": wrong[np.argsort(-certainty[wrong], kind="stable")][:CERTAIN],
        "Least surely right": right[np.argsort(certainty[right], kind="stable")][:CERTAIN],
    }
    show = pictures if isinstance(task, ImageClassification) else sentences
    for title, numbers in chosen.items():
        said = [
            caption(
                task.labels[truth[i]], task.labels[guesses[i]], shares[i, guesses[i]], shares[i, truth[i]]
            )
            for i in numbers
        ]
        if said:
            parts.append(f"<h3>{title}</h3>{show(task, [rows[i] for i in numbers], said)}")
    text = (
        f"Of {len(rows):,} rows of the validation data, {len(wrong):,} are labelled wrong. Shades of the "
        "table are shares of its rows. Numbers in parentheses are probabilities."
    )
    return section("Examples", text, *parts)


def caption(label: str, guess: str, certainty: float, share: float) -> str:
    """Return the label and the prediction of a row with their probabilities."""
    if label == guess:
        return f"{label} ({share:.2f})"
    return f"{label} ({share:.2f}), taken for {guess} ({certainty:.2f})"


def confusion(truth: np.ndarray, guesses: np.ndarray, labels: int) -> np.ndarray:
    """Return how often [label, prediction] occurs."""
    return np.bincount(truth * labels + guesses, minlength=labels**2).reshape(labels, labels)


def matrix(counts: np.ndarray, labels: Sequence[str]) -> str:
    """Return the confusion matrix as a table of counts; the right ones are in bold."""
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in labels)
    body = []
    for number, (name, row) in enumerate(zip(labels, counts)):
        cells = (
            f'<td style="--share: {count / max(row.sum(), 1):.3f}"'
            f"{' class=right' if column == number else ''}>{count}</td>"
            for column, count in enumerate(row.tolist())
        )
        recall = f"{row[number] / row.sum():.1%}" if row.sum() else ""
        body.append(f'<tr><th scope="row">{html.escape(name)}</th>{"".join(cells)}<td>{recall}</td></tr>\n')
    columns = counts.sum(0)
    precision = "".join(
        f"<td>{f'{counts[i, i] / columns[i]:.1%}' if columns[i] else ''}</td>" for i in range(len(labels))
    )
    caption = (
        "Right labels by row, predictions by column. Last column: the share of the row that is right "
        "(recall); last row: the share of the column that is right (precision)."
    )
    return (
        f'<div class="wide"><table class="confusion"><caption class="soft">{caption}</caption>'
        f'<thead><tr><th scope="col">label</th>{head}<th scope="col">recall</th></tr></thead>\n'
        f'<tbody>\n{"".join(body)}<tr><th scope="row">precision</th>{precision}<td></td></tr>\n'
        "</tbody></table></div>"
    )


def frequent(counts: np.ndarray, labels: Sequence[str]) -> str:
    """Return the most frequent mistakes as a table, for more labels than a matrix can show."""
    wrong = counts * (1 - np.eye(len(labels), dtype=counts.dtype))
    order = [place for place in np.argsort(-wrong, axis=None, kind="stable")[:PAIRS] if wrong.flat[place]]
    rows = {
        f"{labels[place // len(labels)]}, taken for {labels[place % len(labels)]}": [str(wrong.flat[place])]
        for place in order
    }
    return table("The most frequent mistakes.", ["rows"], rows)


def pictures(task: ImageClassification, rows: Sequence[Any], said: Sequence[str]) -> str:
    """Return the images with their captions."""
    figures = (
        figure(image_element(task.config.pixels(row), text), text)
        for row, text in zip(rows, said, strict=True)
    )
    return f'<div class="mistaken">{"".join(figures)}</div>'


def sentences(task: Any, rows: Sequence[Any], said: Sequence[str]) -> str:
    """Return the texts with their captions, each to be opened."""
    return "".join(
        details(
            f"{text}: {row['text'][:80]}",
            "".join(
                f'<p dir="auto">{html.escape(row[name])}</p>' for name in ("text", "pair") if name in row
            ),
        )
        for row, text in zip(rows, said, strict=True)
    )


def image_element(pixels: np.ndarray, text: str) -> str:
    """Return an image, uint8 [H, W, 1 or 3], described by `text`."""
    data = base64.b64encode(png(pixels)).decode()
    return f'<img alt="{html.escape(text)}" src="data:image/png;base64,{data}">'


COLOUR_TYPES = {1: 0, 3: 2}  # by channels: grey, and red, green and blue


def png(pixels: np.ndarray) -> bytes:
    """Return the file of an image, uint8 [H, W, 1 or 3]."""
    height, width, channels = pixels.shape
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], 1)  # unfiltered
    head = struct.pack(">IIBBBBB", width, height, 8, COLOUR_TYPES[channels], 0, 0, 0)
    chunks = (b"IHDR", head), (b"IDAT", zlib.compress(lines.tobytes())), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(map(_chunk, *zip(*chunks)))


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
