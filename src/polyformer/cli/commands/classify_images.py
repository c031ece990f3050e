"""Classify image files, converted to the size and the color channels that the model reads."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from polyformer.core.errors import InputError, quote

if TYPE_CHECKING:
    from polyformer.training.tasks import ImageClassification


def classified_images(
    task: "ImageClassification", model: Any, files: list[str]
) -> Iterator[dict[str, float]]:
    """Yield the probability of each label for each file; raise `InputError` for a file that is no image."""
    from polyformer.data import read
    from polyformer.data.image_decoding import SUFFIXES
    from polyformer.training.recipes.classifier import brought

    for file in files:
        if not file.lower().endswith(SUFFIXES):
            kinds = ", ".join(SUFFIXES)
            raise InputError(
                f"IMAGE: this model reads images; expected a file name that ends with one of {kinds}, "
                f"got {quote(file)}; to evaluate a folder use polyformer evaluate RUN --data FOLDER"
            )
    rows: list[Any] = [next(iter(read(brought(task), ("image", "height", "width"), file))) for file in files]
    yield from task.classify(model, rows)
