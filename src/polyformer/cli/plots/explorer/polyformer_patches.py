"""Images that a Vision Transformer of polyformer reads, as readings: patches are tokens."""

import dataclasses

import numpy as np
import torch

from polyformer.cli.plots.explorer.polyformer_images import image
from polyformer.cli.plots.explorer.reading import Picture, Reading
from polyformer.core.errors import InputError
from polyformer.models.architectures import VisionTransformer

BEFORE = "class", "distillation"
"""The names of the tokens before the patches, if the model has them."""


@dataclasses.dataclass(frozen=True, eq=False)
class PolyformerPatches:
    """A reader of images with a `model` of polyformer."""

    name: str
    model: VisionTransformer

    def of_pixels(self, pixels: np.ndarray) -> Reading:
        """Return the reading of an image, uint8 [H, W] or [H, W, 1 or 3], of the model's size."""
        pixels, config = image(pixels), self.model.config
        if pixels.shape[2] == 1:
            pixels = pixels.repeat(config.num_channels, 2)
        if pixels.shape != (*config.image_size, config.num_channels):
            size = " x ".join(map(str, (*config.image_size, config.num_channels)))
            raise InputError(
                f"image: this model reads images of {size}, got one of "
                f"{' x '.join(map(str, pixels.shape))}; scale it, or convert its colours"
            )
        (rows, columns), (high, wide) = self.model.grid, config.patch_size
        device = next(self.model.parameters()).device
        values = self.model.normalize(torch.from_numpy(pixels.copy()).unsqueeze(0).to(device))
        names = [f"row {row} col {column}" for row in range(rows) for column in range(columns)]
        return Reading(
            name=self.name,
            model=self.model,
            inputs={"pixel_values": values},
            tokens={"encoder": [*BEFORE[: config.tokens], *names]},
            picture=Picture(
                pixels=np.ascontiguousarray(pixels[: rows * high, : columns * wide]),
                patch=config.patch_size,
                first=config.tokens,
            ),
        )
