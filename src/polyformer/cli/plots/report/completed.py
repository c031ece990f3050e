"""Examples of models of pixels: validation images, what the model reads of them, and what it generates."""

import numpy as np

from polyformer.cli.plots.report.held import HeldOutRows
from polyformer.cli.plots.report.mistakes import image_element
from polyformer.cli.plots.report.page import figure, section

IMAGES = 6


def completed_images(held: HeldOutRows) -> str:
    """Return the first validation images in rows, a row for each of `pictures` of the task."""
    task = held.task
    parts = []
    for name, images in zip(task.pictures, task.complete(held.model, held.rows, IMAGES, held.seed)):
        figures = []
        for number, levels in enumerate(images.numpy(), 1):
            light = np.where(levels < 0, 255, levels * 255 // (task.levels - 1)).astype(np.uint8)
            pixels = light.reshape(*light.shape[:2], -1)
            figures.append(figure(image_element(pixels, f"{name} {number}"), f"{name} {number}"))
        parts.append(f'<div class="mistaken">{"".join(figures)}</div>')
    text = f"The first validation images in rows: {', '.join(task.pictures)}. Missing pixels are white."
    return section("Examples", text, *parts)
