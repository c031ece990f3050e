"""Images classified: files of images, brought to the size and the colours that the model reads."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from polyformer.core.errors import InputError, quote

if TYPE_CHECKING:
    from polyformer.training.tasks import ImageClassification


def classified_images(
    task: "ImageClassification", model: Any, files: list[str]
) -> Iterator[dict[str, float]]:
    """Yield the probability of each label for each file; `InputError` names one that is no image."""
    from polyformer.data import read
    from polyformer.data.image_decoding import SUFFIXES
    from polyformer.training.recipes.classifier import brought

    for file in files:
        if not file.lower().endswith(SUFFIXES):
            kinds = ", ".join(SUFFIXES)
            raise InputError(
                f"IMAGE: this model reads images; expected a file whose name ends in one of {kinds}, "
                f"got {quote(file)}; a folder of images is measured by polyformer evaluate RUN --data FOLDER"
            )
    rows: list[Any] = [next(iter(read(brought(task), ("image", "height", "width"), file))) for file in files]
    yield from task.classify(model, rows)
