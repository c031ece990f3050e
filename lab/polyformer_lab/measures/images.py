"""Scores of image models, the number of pixels that each pixel sees, and completed images."""

from polyformer.attention.patterns import Pattern
from polyformer.attention.patterns.implied import Causal
from polyformer.attention.patterns.layout import count
from polyformer.core.sequence.context import Context
from polyformer.training.recipes.report import write_sheet
from polyformer.training.tasks import ImageModelling
from polyformer_lab.cells import Cell, Row, measurement
from polyformer_lab.measures.scores import scores


@measurement()
def images(cell: Cell, pixels: int) -> Row:
    """Return the scores and the mean number of keys of a pixel; draw completed images into the cell's folder.

    Args:
        cell: a decoder of images with a `pattern` in its recipe.
        pixels: the number of pixels of an image.
    """
    assert cell.recipe is not None
    fitted = cell.fitted
    assert isinstance(fitted.task, ImageModelling)
    write_sheet(cell.folder / "images.png", fitted.task, fitted.model, fitted.splits, cell.seed or 0)
    return {**scores(cell), "keys": keys(Pattern.from_text(cell.recipe["model"]["pattern"]), pixels)}


def keys(pattern: Pattern, pixels: int) -> float:
    """Return how many keys a pixel has in a decoder, on average."""
    context, limited = Context(pixels, pixels, causal=True), pattern & Causal()
    return sum(count(limited.keys(context, i, i + 1).some) for i in range(pixels)) / pixels
