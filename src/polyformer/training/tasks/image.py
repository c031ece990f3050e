"""Image models: predict the level of each pixel from the previous pixels; measured in bits per dimension.

An image is a start token and its pixels in raster order, each of them one of `levels` levels of grey; each
pixel of a colour image is three tokens, red, green and blue. Parmar et al. 2018 (Image Transformer), section
3, with the categorical distribution over levels.

Deviation: the colours share the embeddings of their levels, while the paper has a table for each; positions
such as `grid` of (height, width, 3) distinguish them.
"""

import dataclasses
import math
from collections.abc import Sequence
from itertools import islice
from typing import Annotated, ClassVar, Self

import numpy as np
import torch
from annotated_types import Interval
from torch import Tensor

from polyformer.attention.patterns import Local2D
from polyformer.attention.patterns.base import parts_in
from polyformer.attention.positions import GridConfig
from polyformer.core.errors import InputError
from polyformer.core.host_values import IGNORED
from polyformer.data import Tokenizer, TokenizerConfig
from polyformer.data.formats.images import GREYS, quantised
from polyformer.data.rows.batching import Row
from polyformer.models.architectures import Transformer
from polyformer.models.config import ModelConfig
from polyformer.models.generation import GenerationConfig, SamplingConfig
from polyformer.nn.heads import HeadConfig, LanguageModelConfig
from polyformer.training.tasks.base import Rows, TaskConfig
from polyformer.training.tasks.text import TextTask, check_batch_size


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


class ImageModelling(TextTask, config=ImageConfig):
    """Image modelling, with metrics from `nats`, the sum of -ln P over every pixel of the held-out images:

    loss          nats / pixels
    bits_per_dim  loss / ln 2: comparable only for the same number of levels; a uniform guess has log2(levels)
    """

    stacks = "decoder"
    head: HeadConfig = LanguageModelConfig()
    pictures: ClassVar[tuple[str, ...]] = ("real", "half", "completed")
    """The names of the images that `complete` returns."""

    def __init__(self, config: ImageConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        if config.height is None or config.width is None:
            raise InputError("height, width: not known before the training images are; call resolve(rows)")
        colours = () if config.channels in (None, 1) else (config.channels,)
        self.levels, self.shape = config.levels, (config.height, config.width, *colours)
        self.start = config.levels  # the id after the last level
        name = "a token more than an image has pixels" + (" of three colours" if colours else "")
        check_batch_size(config.batch_tokens, name, self.positions)

    @property
    def positions(self) -> int:
        """Return the number of tokens: the start token and the colours of every pixel."""
        return math.prod(self.shape) + 1

    def adapt(self, config: ModelConfig) -> ModelConfig:
        """Return the config for this task; raise `InputError` for another image shape."""
        self.check_shapes(config)
        return super().adapt(config)

    def check_shapes(self, config: ModelConfig) -> None:
        """Raise `InputError` if the model is made for another image shape."""
        check_shapes(config, self.shape)

    def prepare(self, rows: Sequence[Row]) -> list[Row]:
        """Return the start token and the levels of each image."""
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

    def metrics(self, totals: list[float], counts: dict[str, float]) -> dict[str, float]:
        """Return loss and bits_per_dim."""
        loss = totals[0] / max(totals[1], 1)
        return {"loss": loss, "bits_per_dim": loss / math.log(2)}

    def complete(self, model: Transformer, rows: Rows, images: int, seed: int) -> Tensor:
        """Return the first images, their upper halves, and these completed by the model.

        They are levels [3, images, height, width], with colours [..., 3]. The missing half is -1. Pixels are
        sampled, deterministic for a seed.
        """
        prepared = self.prepare(list(islice(rows, images)))
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
