"""Super-resolution: an encoder reads a small image, a decoder writes the large image pixel by pixel.

The small image is the mean over squares of `factor` x `factor` pixels of the large image. The decoder is the
image model of `image`, with cross-attention to all pixels of the small image. Parmar et al. 2018 (Image
Transformer), sections 3.3 and 5.3: from 8 x 8 to 32 x 32 pixels.
"""

import dataclasses
import math
from itertools import islice
from typing import Annotated, ClassVar

import numpy as np
import torch
from annotated_types import Ge
from torch import Tensor, nn

from polyformer.core.errors import InputError
from polyformer.data import Tokenizer
from polyformer.data.formats.images import quantised
from polyformer.data.rows.batching import Row
from polyformer.models.architectures import Transformer
from polyformer.models.config import ModelConfig
from polyformer.training.tasks.base import SINGLE_PROCESS, Rows, Workers
from polyformer.training.tasks.image import ImageConfig, ImageModelling, check_shapes

SCORED = 16
"""Number of held-out images that `finish` generates."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SuperResolutionConfig(ImageConfig):
    """Super-resolution: predict the pixels of an image from a smaller copy of it."""

    factor: Annotated[int, Ge(2)] = 4  # pixels of a side for each pixel of the small image

    kind: ClassVar[str] = "super_resolution"
    paper: ClassVar[str] = "Parmar et al. 2018 (Image Transformer), section 5.3"


class SuperResolution(ImageModelling, config=SuperResolutionConfig):
    """Super-resolution, with the metrics of an image model over the pixels of the large images.

    `finish` adds the mean peak signal-to-noise ratio, in decibels, of the first held-out images: `psnr` of
    sampled images, and `psnr_repeated` of small images with repeated pixels.
    """

    config: SuperResolutionConfig
    stacks = "encoder-decoder"
    pictures = "real", "small", "generated"

    def __init__(self, config: SuperResolutionConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        height, width, *colours = self.shape
        if height % config.factor or width % config.factor:
            raise InputError(
                f"factor: expected a divisor of the height {height} and the width {width}, got "
                f"{config.factor}; bring the images to another size with data.image_size"
            )
        self.small = (height // config.factor, width // config.factor, *colours)

    def check_shapes(self, config: ModelConfig) -> None:
        """Raise `InputError` if a stack is made for another image shape."""
        check_shapes(config.encoder, self.small)
        check_shapes(config.decoder, self.shape)

    def levels_of(self, row: Row) -> Row:
        """Return the levels of the small image as input, and the levels of the large image as labels."""
        factor, (height, width, *_) = self.config.factor, self.small
        pixels = np.frombuffer(row["image"], np.uint8).reshape(height, factor, width, factor, -1)
        small = pixels.mean((1, 3)).round().astype(np.uint8)
        return {
            "input_ids": quantised(small.tobytes(), self.levels),
            "labels": quantised(row["image"], self.levels),
        }

    def complete(self, model: Transformer, rows: Rows, images: int, seed: int) -> Tensor:
        """Return the first images, their small copies with repeated pixels, and sampled large images.

        They are levels [3, images, height, width], with colours [..., 3]; deterministic for a seed.
        """
        prepared = self.prepare(list(islice(rows, images)))
        inputs, real = (
            torch.from_numpy(np.stack([row[name] for row in prepared])) for name in ("input_ids", "labels")
        )
        generated = self.sampled(model, inputs, math.prod(self.shape), seed)
        small = inputs.view(len(inputs), *self.small)
        for axis in (1, 2):
            small = small.repeat_interleave(self.config.factor, axis)
        parts = (real, small, generated)
        return torch.stack([part.reshape(len(inputs), *self.shape) for part in parts])

    def finish(self, model: nn.Module, rows: Rows, workers: Workers = SINGLE_PROCESS) -> dict[str, float]:
        """Return `psnr` and `psnr_repeated` of the first `SCORED` images."""
        assert isinstance(model, Transformer)
        real, small, generated = self.complete(model, rows, SCORED, seed=0).double() / (self.levels - 1)
        return {name: psnr(image, real) for name, image in (("psnr", generated), ("psnr_repeated", small))}


def psnr(images: Tensor, real: Tensor) -> float:
    """Return the mean of -10 log10 of the mean squared error of each image; values are between 0 and 1.

    An error below half a level of 256 counts as half a level, so that an exact image has a finite ratio.
    """
    errors = (images - real).square().flatten(1).mean(1).clamp_min(0.25 / 255**2)
    return (-10 * errors.log10()).mean().item()
