"""Images written pixel by pixel: an image model, and super-resolution.

    image              P(level of a pixel | the pixels before it)                     decoder
    super_resolution   P(level of a pixel | the pixels before it, the small image)    encoder-decoder

**image**: measured in bits per dimension. An image is a start token and its pixels in raster order, each of
them one of `levels` levels of grey; each pixel of a colour image is three tokens, red, green and blue. Parmar
et al. 2018 (Image Transformer), section 3, with the categorical distribution over levels.

Deviation: the colours share the embeddings of their levels, while the paper has a table for each; positions
such as `grid` of (height, width, 3) distinguish them.

**super_resolution**: the small image is the mean over squares of `factor` x `factor` pixels of the large
image. The decoder is the image model of `image`, with cross-attention to all pixels of the small image.
Parmar et al. 2018, sections 3.3 and 5.3: from 8 x 8 to 32 x 32 pixels.
"""

import dataclasses
import math
from collections.abc import Sequence
from itertools import islice
from typing import Annotated, Any, ClassVar, Self

import numpy as np
import torch
from annotated_types import Ge, Interval
from torch import Tensor, nn

from polyformer.attention.patterns import Local2D
from polyformer.attention.patterns.base import parts_in
from polyformer.attention.positions import GridConfig
from polyformer.core.errors import InputError
from polyformer.core.host_values import IGNORED
from polyformer.data import Tokenizer, TokenizerConfig
from polyformer.data.formats.images import GREYS, quantised
from polyformer.data.rows import Row
from polyformer.models.architectures import Transformer
from polyformer.models.config import ModelConfig
from polyformer.models.generation import GenerationConfig, SamplingConfig
from polyformer.nn.heads import LanguageModelConfig
from polyformer.training.task import SINGLE_PROCESS, Workers
from polyformer.training.tasks.base import Rows, TaskConfig
from polyformer.training.tasks.text import Perplexity, TextArchitecture, TextRows, TextTask, check_batch_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageConfig(TaskConfig):
    """Image model: predict the next pixel of an image."""

    levels: Annotated[int, Interval(ge=2, le=GREYS)] = 16  # levels per colour, quantised from 256
    height: int | None = None  # None: from the training images
    width: int | None = None
    channels: int | None = None  # 1 for grey, 3 for colours

    needs: ClassVar[tuple[str, ...]] = ("image", "height", "width")
    tokenized: ClassVar[bool] = True
    kind: ClassVar[str] = "image"
    paper: ClassVar[str] = "Parmar et al. 2018 (Image Transformer)"

    def __post_init__(self) -> None:
        if self.channels not in (None, 1, 3):
            raise InputError(f"channels: expected 1 for grey or 3 for colours, got {self.channels}")

    def resolve(self, rows: Rows) -> Self:
        """Return this with the size and the colours of the first image."""
        first = next(iter(rows))
        height, width = self.height or first["height"], self.width or first["width"]
        channels = self.channels or len(first["image"]) // (first["height"] * first["width"])
        return dataclasses.replace(self, height=height, width=width, channels=channels)

    def tokenizer(self, config: TokenizerConfig, rows: Rows) -> Tokenizer:
        """Return a tokenizer with a token for each level; `config` and `rows` are not used."""
        return Tokenizer.of_words([*map(str, range(self.levels)), "<s>"])


class Pixels(TextRows):
    """Rows of the start token and the levels of an image."""

    def __init__(self, config: ImageConfig, tokenizer: Tokenizer, shape: tuple[int, ...]):
        super().__init__(config, tokenizer)
        self.levels, self.shape = config.levels, shape
        self.start = config.levels  # the id after the last level

    def prepare(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows of the images, which have the shape of the first training image."""
        return [self._row(row) for row in rows]

    def _row(self, row: Row) -> Row:
        size = row["height"], row["width"]
        if size != self.shape[:2] or len(row["image"]) != math.prod(self.shape):
            raise InputError(
                f"image: expected {by(self.shape)} pixels, as the first training image has, got "
                f"{by(size)} and {len(row['image'])} bytes; bring the images to one size "
                "with data.image_size, and to grey or colours with data.image_mode (grey, rgb)"
            )
        return self.levels_of(row)

    def levels_of(self, row: Row) -> Row:
        """Return the start token and the levels of an image, with each level as the label of its place."""
        ids = np.concatenate([[self.start], quantised(row["image"], self.levels)])
        return {"input_ids": ids, "labels": np.concatenate([[IGNORED], ids[1:]])}


class BitsPerDimension(Perplexity):
    """The metrics from `nats`, the sum of -ln P over every pixel of the held-out images:

    loss          nats / pixels
    bits_per_dim  loss / ln 2: comparable only for the same number of levels; a uniform guess has log2(levels)
    """

    def values(self, totals: list[float], counts: dict[str, float]) -> dict[str, float]:
        """Return loss and bits_per_dim."""
        loss = totals[0] / max(totals[1], 1)
        return {"loss": loss, "bits_per_dim": loss / math.log(2)}


class ImageModelling(TextTask, config=ImageConfig):
    """Image modelling, measured by `BitsPerDimension`."""

    stacks: ClassVar[str] = "decoder"
    pictures: ClassVar[tuple[str, ...]] = ("real", "half", "completed")
    """The names of the images that `complete` returns."""

    def __init__(self, config: ImageConfig, tokenizer: Tokenizer):
        if config.height is None or config.width is None:
            raise InputError("height, width: not known before the training images are; call resolve(rows)")
        colours = () if config.channels in (None, 1) else (config.channels,)
        self.levels, self.shape = config.levels, (config.height, config.width, *colours)
        self.positions = math.prod(self.shape) + 1  # the start token and the colours of every pixel
        name = "a token more than an image has pixels" + (" of three colours" if colours else "")
        check_batch_size(config.batch_tokens, name, self.positions)
        architecture = TextArchitecture(
            self.stacks, LanguageModelConfig(), tokenizer, self.positions, change=self.checked
        )
        rows = self.pixels(config, tokenizer)
        super().__init__(config, tokenizer, rows=rows, architecture=architecture, metrics=BitsPerDimension())

    def pixels(self, config: Any, tokenizer: Tokenizer) -> Pixels:
        """Return the rows of the task."""
        return Pixels(config, tokenizer, self.shape)

    def checked(self, config: ModelConfig) -> ModelConfig:
        """Return `config`; raise `InputError` if the model is for another image shape."""
        check_shapes(config, self.shape)
        return config

    def complete(self, model: Transformer, rows: Rows, images: int, seed: int) -> Tensor:
        """Return the first images, their upper halves, and these completed by the model.

        They are levels [3, images, height, width], with colours [..., 3]. The missing half is -1. Pixels are
        sampled, deterministic for a seed.
        """
        prepared = self.rows.prepare(list(islice(rows, images)))
        real = torch.from_numpy(np.stack([row["input_ids"] for row in prepared]))
        known = 1 + self.shape[0] // 2 * math.prod(self.shape[1:])
        completed = self.sampled(model, real[:, :known], self.positions - known, seed)
        half = real.clone()
        half[:, known:] = -1
        return torch.stack([real, half, completed])[:, :, 1:].reshape(3, len(real), *self.shape)

    def sampled(self, model: Transformer, ids: Tensor, number: int, seed: int) -> Tensor:
        """Return `number` sampled levels, behind `ids` if the model has no encoder.

        A start token within an image is very improbable after training; it is shown as white.
        """
        config = GenerationConfig(max_new_tokens=number, sampling=SamplingConfig(do_sample=True, seed=seed))
        generated = model.generate(ids.to(next(model.parameters()).device), None, config)
        return generated.sequences.cpu().clamp_max(self.levels - 1)


def check_shapes(config: object, wanted: tuple[int, ...]) -> None:
    """Raise `InputError` if a part of `config` is made for images of another shape."""
    for shape in shapes(config):
        if (shape[:-1] if len(shape) == 3 and shape[-1] == 1 else shape) != wanted:
            raise InputError(
                f"model: it is made for images of {by(shape)}, and the data's are {by(wanted)}; "
                "give this shape to Local2D and to the grid of positions"
            )


def by(shape: tuple[int, ...]) -> str:
    """Return a shape as text, such as 28 x 28."""
    return " x ".join(map(str, shape))


def shapes(config: object) -> list[tuple[int, ...]]:
    """Return the image shapes in a model's configuration."""
    return [part.shape for part in parts_in(config) if isinstance(part, Local2D | GridConfig)]


SCORED = 16
"""Number of held-out images that `finish` generates."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SuperResolutionConfig(ImageConfig):
    """Super-resolution: predict the pixels of an image from a smaller copy of it."""

    factor: Annotated[int, Ge(2)] = 4  # pixels of a side for each pixel of the small image

    kind: ClassVar[str] = "super_resolution"
    paper: ClassVar[str] = "Parmar et al. 2018 (Image Transformer), section 5.3"


class SmallAndLargePixels(Pixels):
    """Rows of the levels of a small image as input, and of the large image as labels."""

    def __init__(self, config: SuperResolutionConfig, tokenizer: Tokenizer, shape: tuple[int, ...]):
        super().__init__(config, tokenizer, shape)
        self.factor = config.factor
        height, width, *colours = shape
        if height % config.factor or width % config.factor:
            raise InputError(
                f"factor: expected a divisor of the height {height} and the width {width}, got "
                f"{config.factor}; bring the images to another size with data.image_size"
            )
        self.small = (height // config.factor, width // config.factor, *colours)

    def levels_of(self, row: Row) -> Row:
        """Return the levels of the small image as input, and the levels of the large image as labels."""
        factor, (height, width, *_) = self.factor, self.small
        pixels = np.frombuffer(row["image"], np.uint8).reshape(height, factor, width, factor, -1)
        small = pixels.mean((1, 3)).round().astype(np.uint8)
        return {
            "input_ids": quantised(small.tobytes(), self.levels),
            "labels": quantised(row["image"], self.levels),
        }


class SuperResolution(ImageModelling, config=SuperResolutionConfig):
    """Super-resolution, with the metrics of an image model over the pixels of the large images.

    `finish` adds the mean peak signal-to-noise ratio, in decibels, of the first held-out images: `psnr` of
    sampled images, and `psnr_repeated` of small images with repeated pixels.
    """

    rows: SmallAndLargePixels
    stacks = "encoder-decoder"
    pictures = "real", "small", "generated"

    def pixels(self, config: Any, tokenizer: Tokenizer) -> SmallAndLargePixels:
        """Return the rows of the task."""
        return SmallAndLargePixels(config, tokenizer, self.shape)

    def checked(self, config: ModelConfig) -> ModelConfig:
        """Return `config`; raise `InputError` if a stack is for another image shape."""
        check_shapes(config.encoder, self.rows.small)
        check_shapes(config.decoder, self.shape)
        return config

    def complete(self, model: Transformer, rows: Rows, images: int, seed: int) -> Tensor:
        """Return the first images, their small copies with repeated pixels, and sampled large images.

        They are levels [3, images, height, width], with colours [..., 3]; deterministic for a seed.
        """
        prepared = self.rows.prepare(list(islice(rows, images)))
        inputs, real = (
            torch.from_numpy(np.stack([row[name] for row in prepared])) for name in ("input_ids", "labels")
        )
        generated = self.sampled(model, inputs, math.prod(self.shape), seed)
        small = inputs.view(len(inputs), *self.rows.small)
        for axis in (1, 2):
            small = small.repeat_interleave(self.rows.factor, axis)
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
