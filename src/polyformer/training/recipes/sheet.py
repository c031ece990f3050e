"""Baselines for a finished image model, and a figure of completed images."""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from torch import Tensor

from polyformer.core.figures import new_figure, save_figure
from polyformer.core.labels import IGNORED
from polyformer.data import Splits
from polyformer.models.architectures import Transformer
from polyformer.training.tasks import ImageModelling
from polyformer.training.tasks.base import Rows

Row = tuple[str, dict[str, float]]

IMAGES = 10
GAP = 1  # pixels between images


def image_baselines(task: ImageModelling, splits: Splits) -> list[Row]:
    """Return the validation metrics of a uniform guess, and of the level frequencies of each pixel.

    The frequencies are smoothed by one count of every level, so that no level is impossible (Laplace).
    """
    if splits.validation is None:
        return []
    train, held = (_levels(task, rows) for rows in (splits.train, splits.validation))
    place = np.arange(train.shape[1])
    counts = np.ones((train.shape[1], task.levels))
    for image in train:
        counts[place, image] += 1
    nats = -np.log(counts / counts.sum(1, keepdims=True))[place, held].sum()
    even = held.size * math.log(task.levels)
    return [
        (name, task.metrics([float(sum_), held.size], {}))
        for name, sum_ in (("uniform", even), ("each pixel by itself", nats))
    ]


def write_sheet(path: Path, task: ImageModelling, model: Transformer, splits: Splits, seed: int) -> None:
    """Draw the first held-out images, what the model reads of them, and what it generates, into `path`.

    Raises `InputError` if matplotlib is not installed.
    """
    held = next(rows for rows in (splits.test, splits.validation, splits.train) if rows is not None)
    write_pictures(path, dict(zip(task.pictures, task.complete(model, held, IMAGES, seed))), task.levels)


def write_pictures(path: Path, images: Mapping[str, Tensor], levels: int) -> None:
    """Draw images as named rows of pictures; negative levels are blank.

    images: levels [N, height, width], or [N, height, width, 3] for red, green and blue.
    """
    rows, (number, height, width) = len(images), next(iter(images.values())).shape[:3]
    paper = np.ones((rows * (height + GAP) - GAP, number * (width + GAP) - GAP, 3))
    for row, pictures in enumerate(images.values()):
        for column, picture in enumerate(pictures):
            top, left = row * (height + GAP), column * (width + GAP)
            light = np.where(picture < 0, 1, picture / (levels - 1)).reshape(height, width, -1)
            paper[top : top + height, left : left + width] = light
    figure = new_figure(1 + number, len(images) + 1)
    axis = figure.subplots()
    axis.imshow(paper)
    centres = [row * (height + GAP) + (height - 1) / 2 for row in range(rows)]
    axis.set_yticks(centres, list(images))
    axis.set_xticks([])
    axis.spines[:].set_visible(False)
    save_figure(figure, path)


def _levels(task: ImageModelling, rows: Rows) -> np.ndarray:
    """Return the levels [images, pixels]."""
    labels = np.stack([row["labels"] for row in task.prepare(list(rows))])
    return labels[:, labels[0] != IGNORED]
