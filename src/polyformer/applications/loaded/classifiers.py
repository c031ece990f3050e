"""Classification of texts, pairs of texts and images, and regression."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from polyformer.applications.loaded.base import LabelledModel, LoadedModel
from polyformer.applications.loaded.inputs import is_picture, pair_of, texts_of
from polyformer.applications.loaded.results import Prediction
from polyformer.core.errors import InputError, quote
from polyformer.data import read
from polyformer.data.formats.images import SUFFIXES, picture_row
from polyformer.training.recipes.reader import Reader
from polyformer.training.recipes.run import brought


class TextModel(LoadedModel):
    """A model that reads texts or pairs of texts."""

    @property
    def pairs(self) -> bool | None:
        """Return whether the model reads pairs of texts; None for a checkpoint, which does not record it."""
        return None if isinstance(self.task, Reader) else "pair" in self.task.config.needs

    def _columns(self, items: Sequence[Any]) -> tuple[list[str], list[str] | None]:
        """Return the texts, and the second texts of pairs or None; raise `InputError` for the other kind."""
        pairs = self.pairs
        if pairs is None:
            pairs = isinstance(items[0], tuple)
        if pairs:
            both = [pair_of("inputs", item) for item in items]
            return [first for first, _ in both], [second for _, second in both]
        if any(isinstance(item, tuple) for item in items):
            raise InputError(
                f"inputs: expected single texts, for which {self.path} was trained, got a pair of texts"
                if self.pairs is False
                else "inputs: expected either only texts or only pairs of texts, got both"
            )
        return texts_of("inputs", items), None


class TextClassifier(TextModel, LabelledModel):
    """A classifier of texts or of pairs of texts."""

    command: ClassVar[str] = "classify"
    does: ClassVar[str] = "classify"

    def classify(self, inputs: Any) -> Any:
        """Return a `Prediction` for each text, or for each pair of texts (a tuple)."""

        def predictions(items: list[Any]) -> list[Prediction]:
            shares = self.task.classify(self.model, *self._columns(items))
            return [Prediction.of(probabilities) for probabilities in shares]

        return self._each(inputs, predictions)


class Regressor(TextModel):
    """A model that assigns a number to a text or a pair of texts; checkpoints may assign several."""

    command: ClassVar[str] = "classify"
    does: ClassVar[str] = "regress"

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the names of the numbers of a checkpoint; empty for a run, whose number has no name."""
        return tuple(self.task.labels) if isinstance(self.task, Reader) else ()

    def regress(self, inputs: Any) -> Any:
        """Return the number of each text or pair of texts; by label name if the checkpoint has several."""

        def numbers(items: list[Any]) -> Sequence[float | Mapping[str, float]]:
            texts, pairs = self._columns(items)
            if not isinstance(self.task, Reader):
                return self.task.predict(self.model, texts, pairs)
            named = self.task.classify(self.model, texts, pairs)
            return [next(iter(values.values())) if len(values) == 1 else values for values in named]

        return self._each(inputs, numbers)


class ImageClassifier(LabelledModel):
    """A classifier of images."""

    command: ClassVar[str] = "classify"
    does: ClassVar[str] = "classify"
    reads_text: ClassVar[bool] = False

    def classify(self, inputs: Any) -> Any:
        """Return a `Prediction` for each image: the name or path of a file, or an image of Pillow."""

        def predictions(items: list[Any]) -> list[Prediction]:
            rows = [self._row(item) for item in items]
            return [Prediction.of(shares) for shares in self.task.classify(self.model, rows)]

        return self._each(inputs, predictions)

    def _row(self, image: Any) -> dict[str, Any]:
        """Return the pixels of an image in the size and the colours of the model."""
        reading = brought(self.task)
        if is_picture(image):
            return picture_row(image, reading.image_size, reading.image_mode)
        if not isinstance(image, str | os.PathLike) or not os.fspath(image).lower().endswith(SUFFIXES):
            raise InputError(
                f"IMAGE: this model reads images; expected an image of Pillow, or a file name that ends with "
                f"one of {', '.join(SUFFIXES)}, got {quote(image)}; to evaluate a folder use polyformer "
                "evaluate RUN --data FOLDER"
            )
        return next(iter(read(reading, ("image", "height", "width"), os.fspath(image))))  # type: ignore[arg-type]
