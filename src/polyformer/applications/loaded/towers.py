"""Models of texts and images: vectors of both, and labels of images by their names, without training."""

import copy
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from polyformer.applications.loaded.base import LoadedModel, Prediction, is_picture, several, texts_of, warn
from polyformer.core.errors import InputError, quote
from polyformer.core.modules import evaluating
from polyformer.data.formats.images import SUFFIXES

if TYPE_CHECKING:
    from polyformer.applications.towers import TowerEncoder

TEMPLATE = "a photo of a {}."
"""The text of a label: Radford et al. 2021 (CLIP), section 3.1.4."""


class TextsAndImages(LoadedModel):
    """A model of two towers, such as CLIP."""

    command: ClassVar[str] = "classify"
    does: ClassVar[str] = "classify"
    reads_text: ClassVar[bool] = False  # its labels are texts; its inputs are images

    def __init__(self, path: Path, task: Any, model: Any):
        super().__init__(path, task, model)
        self.names: tuple[str, ...] = ()

    @property
    def can(self) -> tuple[str, ...]:
        return "predict", "classify", "embed"

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the names of the labels; empty before some are set."""
        return self.names

    @cached_property
    def encoder(self) -> "TowerEncoder":
        """The encoder of texts and of images."""
        from polyformer.applications.towers import TowerEncoder

        return TowerEncoder(self.path, self.model.scale.device, model=self.model)

    def with_labels(self, names: str | Sequence[str] | None) -> Self:
        """Return this model with labels: a list, or a text of names separated by commas.

        Raises `InputError` for fewer than two labels.
        """
        listed = names.split(",") if isinstance(names, str) else list(names or ())
        labels = tuple(dict.fromkeys(name.strip() for name in listed if name.strip()))
        if len(labels) < 2:
            raise InputError(
                f"labels: expected the names of two or more labels, got {quote(list(labels))}; on the "
                'command line --labels "cat, dog"'
            )
        chosen = copy.copy(self)
        chosen.names = labels
        return chosen

    def classify(self, inputs: Any, labels: Sequence[str] | None = None, template: str = TEMPLATE) -> Any:
        """Return a `Prediction` for each image: the names of files or of folders, or images of Pillow.

        labels: names of the labels; None: those of `with_labels`. template: the text of a label, with {} for
        its name.
        """
        model = self if labels is None and self.names else self.with_labels(labels)
        if "{}" not in template:
            raise InputError(f"template: expected a text with {{}} for the label, got {quote(template)}")
        images, single = self._images(inputs)
        with evaluating(self.model), torch.no_grad():
            texts = self.encoder.of_texts([template.replace("{}", name) for name in model.names]).vectors
            vectors = self.encoder.of_images(images)
            device = self.model.scale.device
            shares = self.model.probabilities(texts.to(device), vectors.to(device)).tolist()
        results = [Prediction.of(dict(zip(model.names, row))) for row in shares]
        return results[0] if single else results

    def embed(self, texts: Any, pooling: str | None = None, normalize: bool = True) -> Any:
        """Return the vectors of texts or of images, float32 [inputs, width], or [width] for a single input.

        Names of image files and images of Pillow are images, all else is a text. Vectors have length 1.
        """
        if pooling is not None or not normalize:
            raise InputError("pooling, normalize: this model defines its vectors; leave them out")
        items, single = several(texts)
        pictures = [is_picture(item) or _names_image(item) for item in items]
        with evaluating(self.model):
            if any(pictures):
                if not all(pictures):
                    raise InputError("texts: expected either only texts or only images, got both")
                vectors = self.encoder.of_images(items)
            else:
                vectors, cut = self.encoder.of_texts(texts_of("texts", items))
                if cut:
                    warn(f"{len(cut)} of {len(items)} texts are cut to {self.encoder.max_length} tokens")
        return vectors[0].numpy() if single else vectors.numpy()

    def _images(self, inputs: Any) -> tuple[list[Any], bool]:
        """Return the images, and whether there was a single image instead of several."""
        from polyformer.applications.towers import image_files

        items, single = several(inputs)
        images: list[Any] = []
        for item in items:
            if is_picture(item):
                images.append(item)
            elif not isinstance(item, str | os.PathLike) or not (Path(item).is_dir() or _names_image(item)):
                raise InputError(
                    f"IMAGE: expected an image of Pillow, a folder, or a file name that ends with one of "
                    f"{', '.join(SUFFIXES)}, got {quote(item)}"
                )
            else:
                images += image_files([os.fspath(item)])
        return images, single and len(images) == 1 and not (items and _is_folder(items[0]))


def _names_image(item: Any) -> bool:
    return isinstance(item, str | os.PathLike) and os.fspath(item).lower().endswith(SUFFIXES)


def _is_folder(item: Any) -> bool:
    return isinstance(item, str | os.PathLike) and Path(item).is_dir()
