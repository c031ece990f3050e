"""Results of a finished run as text and pictures: a table, a text sample, completed images."""

from pathlib import Path

import numpy as np

from polyformer.core.measuring import new_figure, save_figure
from polyformer.data import Splits
from polyformer.models.architectures import Transformer
from polyformer.models.generation import GenerationConfig, SamplingConfig
from polyformer.training.tasks import ImageModelling, LanguageModelling

Row = tuple[str, dict[str, float]]


def sample(task: LanguageModelling, model: Transformer, seed: int, max_new_tokens: int = 160) -> str:
    """Return the prompt of the task and a sampled continuation, deterministic for a seed."""
    prompt = task.config.prompt
    budget = model.config.max_position_embeddings - len(task.start(prompt))
    drawing = SamplingConfig(do_sample=True, temperature=0.7, top_p=0.95, seed=seed)
    config = GenerationConfig(max_new_tokens=max(1, min(max_new_tokens, budget)), sampling=drawing)
    return prompt + task.generate(model, prompt, config)[0]


def table(rows: list[Row]) -> str:
    """Format rows of metrics as aligned text."""
    names = list(dict.fromkeys(name for _, metrics in rows for name in metrics))
    first = max(len(title) for title, _ in rows)
    lines = [" " * first + "".join(f"  {name.replace('_', ' '):>10}" for name in names)]
    for title, metrics in rows:
        cells = (
            f"{number(metrics[name]) if name in metrics else '':>{max(10, len(name))}}" for name in names
        )
        lines.append(f"{title:<{first}}  {'  '.join(cells)}")
    return "\n".join(lines)


def number(value: float) -> str:
    """Format a metric with four digits."""
    return f"{value:,.0f}" if value >= 10_000 else f"{value:.4g}"


IMAGES = 10
GAP = 1  # pixels between images


def write_sheet(path: Path, task: ImageModelling, model: Transformer, splits: Splits, seed: int) -> None:
    """Draw the first held-out images, what the model reads of them, and what it generates, into `path`.

    They are named rows of pictures; negative levels are blank. Raises `InputError` if matplotlib is not
    installed.
    """
    held = next(rows for rows in (splits.test, splits.validation, splits.train) if rows is not None)
    images = dict(zip(task.pictures, task.complete(model, held, IMAGES, seed)))
    rows, (number, height, width) = len(images), next(iter(images.values())).shape[:3]
    paper = np.ones((rows * (height + GAP) - GAP, number * (width + GAP) - GAP, 3))
    for row, pictures in enumerate(images.values()):
        for column, picture in enumerate(pictures):
            top, left = row * (height + GAP), column * (width + GAP)
            light = np.where(picture < 0, 1, picture / (task.levels - 1)).reshape(height, width, -1)
            paper[top : top + height, left : left + width] = light
    figure = new_figure(1 + number, len(images) + 1)
    axis = figure.subplots()
    axis.imshow(paper)
    centres = [row * (height + GAP) + (height - 1) / 2 for row in range(rows)]
    axis.set_yticks(centres, list(images))
    axis.set_xticks([])
    axis.spines[:].set_visible(False)
    save_figure(figure, path)
