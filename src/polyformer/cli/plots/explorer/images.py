"""Images as readings: a token per level of a pixel, or per patch.

Models of polyformer read pixels or patches, vision models of transformers read patches.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyformer.cli.plots.explorer.reading import Picture, Prediction, Reading, run_alone
from polyformer.cli.plots.explorer.record import Windows
from polyformer.core.errors import InputError
from polyformer.core.modules import evaluating
from polyformer.data.formats.images import GREYS, quantised
from polyformer.models.architectures import Transformer, VisionTransformer
from polyformer.nn.heads import ClassifyConfig
from polyformer.training.tasks.image import by, shapes

COLOURS = " red", " green", " blue"


def pixels_reading(name: str, model: Transformer, pixels: np.ndarray) -> Reading:
    """Return the reading of an image, uint8 [H, W] or [H, W, 1 or 3], by a model of the task `image`."""
    pixels = image(pixels)
    height, width, channels = pixels.shape
    size = (height, width) if channels == 1 else (height, width, channels)
    for shape in shapes(model.config):
        if (shape[:-1] if shape[2:] == (1,) else shape) != size:
            raise InputError(f"image: this model reads images of {by(shape)}, got one of {by(size)}")
    count = model.config.vocab_size - 1  # the last token is the start
    levels = quantised(pixels.tobytes(), count)
    ids = torch.from_numpy(np.concatenate([[count], levels])).unsqueeze(0)
    colours = COLOURS if channels == 3 else ("",)
    names = [
        f"row {row} col {column}{colour}"
        for row, column, colour in itertools.product(range(height), range(width), colours)
    ]
    seen = (levels * (GREYS - 1) // (count - 1)).astype(np.uint8).reshape(pixels.shape)
    return Reading(
        name=name,
        model=model,
        inputs={"input_ids": ids.to(next(model.parameters()).device)},
        tokens={"decoder": ["start", *names]},
        picture=Picture(pixels=seen, first=1, tokens=channels),
    )


def image(pixels: np.ndarray) -> np.ndarray:
    """Return an image with or without a channel axis as [H, W, 1 or 3]; raises `InputError` otherwise."""
    pixels = np.asarray(pixels)
    channels = (*pixels.shape, 1)[2:3]
    fits = pixels.ndim in (2, 3) and channels in [(1,), (3,)] and pixels.size
    if pixels.dtype != np.uint8 or not fits:
        raise InputError(
            f"image: expected uint8 [H, W] or [H, W, 1 or 3], got {pixels.dtype} {list(pixels.shape)}"
        )
    return pixels.reshape(*pixels.shape[:2], *channels)


BEFORE = "class", "distillation"
"""The names of the tokens before the patches, if the model has them."""


def patches_reading(
    name: str, model: VisionTransformer, pixels: np.ndarray, labels: Sequence[str] = ()
) -> Reading:
    """Return the reading of an image, uint8 [H, W] or [H, W, 1 or 3] of the model's size, by its patches.

    labels: the names of the labels of a classifier; by default those of its checkpoint.
    """
    pixels, config = image(pixels), model.config
    if pixels.shape[2] == 1:
        pixels = pixels.repeat(config.num_channels, 2)
    if pixels.shape != (*config.image_size, config.num_channels):
        size = " x ".join(map(str, (*config.image_size, config.num_channels)))
        raise InputError(
            f"image: this model reads images of {size}, got one of "
            f"{' x '.join(map(str, pixels.shape))}; scale it, or convert its colours"
        )
    (rows, columns), (high, wide) = model.grid, config.patch_size
    device = next(model.parameters()).device
    values = model.normalize(torch.from_numpy(pixels.copy()).unsqueeze(0).to(device))
    names = [f"row {row} col {column}" for row in range(rows) for column in range(columns)]
    return Reading(
        name=name,
        model=model,
        inputs={"pixel_values": values},
        tokens={"encoder": [*BEFORE[: config.tokens], *names]},
        picture=Picture(
            pixels=np.ascontiguousarray(pixels[: rows * high, : columns * wide]),
            patch=config.patch_size,
            first=config.tokens,
        ),
        prediction=predicted(model, values, labels),
    )


@torch.no_grad()
def predicted(model: VisionTransformer, values: Tensor, labels: Sequence[str]) -> Prediction | None:
    """Return the prediction for `pixel_values` [1, C, H, W]; None for a model that is no classifier."""
    if not isinstance(model.config.head, ClassifyConfig):
        return None
    fields = {} if model.config.origin is None else model.config.origin.fields
    known = dict(enumerate(labels)) or {
        int(key): str(name) for key, name in fields.get("id2label", {}).items()
    }
    with evaluating(model):
        return Prediction.of(model(values).logits[0].cpu(), known)


PARTS = ("vision_model", "vision_tower", "visual"), ("text_model", "language_model")
"""Names of the parts for images, and of the parts for texts, in models of transformers."""


def part_for(model: Any, images: bool) -> Any:
    """Return the part for images or texts of a model with both (CLIP, LLaVA); any other model itself."""
    vision, text = (
        next(filter(None, (getattr(model, name, None) for name in names)), None) for names in PARTS
    )
    return model if vision is None or text is None else vision if images else text


CLASSIFIER = "ForImageClassification"
"""The end of the names of transformers' classifiers of images."""


def without_head(model: Any) -> tuple[Any, Any]:
    """Return the backbone of a classifier of images, and the classifier; for others `model` and None."""
    return (model.base_model, model) if type(model).__name__.endswith(CLASSIFIER) else (model, None)


@dataclasses.dataclass(frozen=True, eq=False)
class TransformersImages:
    """A reader of images with a `model` of transformers for pixels, and its image `processor`.

    classifier: the model with a head that predicts labels, or None.
    """

    name: str
    model: Any
    processor: Any
    classifier: Any = None

    def of_pixels(self, pixels: np.ndarray) -> Reading:
        """Return the reading of an image, uint8 [H, W] or [H, W, 1 or 3], scaled by the processor."""
        read = self._of_pixels(pixels)
        if self.classifier is None:
            return read
        with torch.no_grad(), evaluating(self.classifier):
            logits = run_alone(self.classifier, read.inputs).logits[0]
        names = {int(number): str(name) for number, name in self.classifier.config.id2label.items()}
        return dataclasses.replace(read, prediction=Prediction.of(logits.cpu(), names))

    def _of_pixels(self, pixels: np.ndarray) -> Reading:
        pixels = image(pixels)
        pixels = pixels.repeat(3 // pixels.shape[2], 2)
        values = self.processor(images=pixels, input_data_format="channels_last", return_tensors="pt")
        parameter = next(part for part in self.model.parameters() if part.is_floating_point())
        values = values["pixel_values"].to(parameter)
        if values.dim() != 4 or len(values) != 1:
            raise InputError(
                f"model: {type(self.processor).__name__} makes pixel_values {[*values.shape]} of an image, "
                "and only those of [1, C, H, W] can be shown on the picture"
            )
        patch, windows = self._patch(), Windows(self.model)
        if windows.layers:
            return self._of_windows(values, patch, windows)
        height, width = values.shape[2] // patch[0], values.shape[3] // patch[1]
        first = self._tokens(values) - height * width
        if first < 0:
            raise InputError(
                f"model: the tokens of {type(self.model).__name__} are no patches of one size, {height} x "
                f"{width} of them, and so cannot be shown on the picture"
            )
        before = ["class", *(f"token {i + 1}" for i in range(1, first))][:first]
        names = [f"row {row} col {column}" for row in range(height) for column in range(width)]
        return Reading(
            name=self.name,
            model=self.model,
            inputs={"pixel_values": values},
            tokens={"encoder": [*before, *names]},
            picture=Picture(pixels=self._seen(values), patch=patch, first=first),
        )

    def _of_windows(self, values: Tensor, patch: tuple[int, int], windows: Windows) -> Reading:
        """Return the reading of a model that has fewer and larger patches in each stage."""
        with torch.no_grad(), windows.watched():
            run_alone(self.model, {"pixel_values": values})
        grids = windows.stages()
        high, wide = next(iter(grids.values()))
        return Reading(
            name=self.name,
            model=self.model,
            inputs={"pixel_values": values},
            tokens={stage: windows.names(stage) for stage in grids},
            picture=Picture(
                pixels=self._seen(values),
                patch=patch,
                patches={
                    stage: (patch[0] * -(-high // rows), patch[1] * -(-wide // columns))
                    for stage, (rows, columns) in grids.items()
                },
            ),
        )

    def _patch(self) -> tuple[int, int]:
        size = getattr(self.model.config, "patch_size", None)
        if isinstance(size, int):
            return size, size
        if isinstance(size, list | tuple) and len(size) == 2:
            return size[0], size[1]
        raise InputError(f"model: {type(self.model).__name__} does not say how large its patches are")

    @torch.no_grad()
    def _tokens(self, values: Tensor) -> int:
        hidden = getattr(run_alone(self.model, {"pixel_values": values}), "last_hidden_state", None)
        return hidden.shape[1] if isinstance(hidden, Tensor) and hidden.dim() == 3 else -1

    def _seen(self, values: Tensor) -> np.ndarray:
        """Return the pixels that the model reads, uint8 [H, W, 3]."""
        pixels = values[0].float().cpu()
        if getattr(self.processor, "do_normalize", False):
            mean, deviation = (
                torch.tensor(getattr(self.processor, name)).view(-1, 1, 1)
                for name in ("image_mean", "image_std")
            )
            pixels = pixels * deviation + mean
        return (pixels.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).contiguous().numpy()
