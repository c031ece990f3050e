"""The mistakes of a classifier on held-out data: its confusion matrix, and its most certain wrong answers."""

import base64
import html
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import nn

from polyformer.cli.plots.report.page import details, figure, section, table
from polyformer.data import load
from polyformer.training.recipes.run import Run
from polyformer.training.tasks import ImageClassification, SingleLabelTask

MATRIX = 30
"""The most labels of a confusion matrix; with more labels, the most frequent mistakes are listed."""

PAIRS, SHOWN = 20, 12
"""The number of frequent mistakes that are listed, and of single mistakes that are shown."""


def mistakes(run: Run, model: nn.Module) -> str:
    """Return the section of a run with a task that predicts one label; "" for others and without held-out
    data.

    The data are the test data if there are any, else the validation data.
    """
    task = run.task
    if not isinstance(task, SingleLabelTask):
        return ""
    splits = load(run.recipe.data, run.recipe.task.needs)
    split, held = ("test", splits.test) if splits.test is not None else ("validation", splits.validation)
    if held is None or not hasattr(held, "__len__"):
        return ""
    rows: list[Any] = [*held]
    shares = task.probabilities(model, rows).numpy()
    truth = np.array([task.label_id(str(row["label"])) for row in rows])
    guesses = shares.argmax(1)
    counts = confusion(truth, guesses, len(task.labels))
    wrong = np.flatnonzero(guesses != truth)
    parts = [matrix(counts, task.labels) if len(task.labels) <= MATRIX else frequent(counts, task.labels)]
    if len(wrong):
        surest = wrong[np.argsort(-shares[wrong, guesses[wrong]], kind="stable")][:SHOWN]
        said = [
            (task.labels[truth[i]], task.labels[guesses[i]], float(shares[i, guesses[i]])) for i in surest
        ]
        chosen = [rows[i] for i in surest]
        images = isinstance(task, ImageClassification)
        parts.append("<h3>Most surely wrong</h3>")
        parts.append(pictures(task, chosen, said) if images else sentences(chosen, said))
    text = (
        f"Of {len(rows):,} rows of the {split} data, {len(wrong):,} are labelled wrong. Shades of the table "
        "are shares of its rows."
    )
    return section("Mistakes", text, *parts)


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


def pictures(task: ImageClassification, rows: Sequence[Any], said: Sequence[tuple[str, str, float]]) -> str:
    """Return the images with their labels and the predictions."""
    figures = []
    for row, (label, guess, share) in zip(rows, said):
        data = base64.b64encode(png(task.config.pixels(row))).decode()
        caption = f"{label}, taken for {guess} ({share:.2f})"
        picture = f'<img alt="{html.escape(caption)}" src="data:image/png;base64,{data}">'
        figures.append(figure(picture, caption))
    return f'<div class="mistaken">{"".join(figures)}</div>'


def sentences(rows: Sequence[Any], said: Sequence[tuple[str, str, float]]) -> str:
    """Return the texts with their labels and the predictions, each to be opened."""
    return "".join(
        details(
            f"{label}, taken for {guess} ({share:.2f}): {row['text'][:80]}",
            "".join(f"<p>{html.escape(row[name])}</p>" for name in ("text", "pair") if name in row),
        )
        for row, (label, guess, share) in zip(rows, said)
    )


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
