"""Images that a vision model of transformers reads, as readings: patches are tokens."""

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyformer.cli.plots.explorer.polyformer_images import image
from polyformer.cli.plots.explorer.reading import Picture, Prediction, Reading, run_alone
from polyformer.cli.plots.explorer.windows import Windows
from polyformer.core.errors import InputError
from polyformer.core.evaluation_mode import evaluating

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
