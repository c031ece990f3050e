"""Images, pixel by pixel: predict each pixel's level from those before it; measured in bits per dimension.

An image is a start token and its pixels in raster order, each one of `levels` levels of grey; of a colour
image each pixel is three tokens, red, green and blue. Parmar et al. 2018 (Image Transformer), section 3, with
the categorical distribution over levels.

Deviation: the colours share the embeddings of their levels, where the paper has a table for each; which
colour a token is, positions such as `grid` of (height, width, 3) tell.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn

from polyformer.architecture import ModelConfig
from polyformer.core.errors import InputError
from polyformer.data import Tokenizer, TokenizerConfig
from polyformer.data.batching import Batch, Row
from polyformer.data.images import GREYS, quantised
from polyformer.generation import GenerationConfig, SamplingConfig
from polyformer.heads import HeadConfig, LanguageModelConfig
from polyformer.model import Transformer
from polyformer.patterns import Local2D
from polyformer.position import GridConfig
from polyformer.tasks.base import Rows, TaskConfig, TextTask, check_room

IGNORED = -100


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageConfig(TaskConfig):
    """Predict the next pixel of an image."""

    levels: int = 16  # of each colour, that the 256 of the data are made into
    height: int | None = None  # None: as the training images are
    width: int | None = None
    channels: int | None = None  # 1 for grey, 3 for colours

    needs: ClassVar[tuple[str, ...]] = ("image", "height", "width")
    kind: ClassVar[str] = "image"
    paper: ClassVar[str] = "Parmar et al. 2018 (Image Transformer)"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= self.levels <= GREYS:
            raise InputError(f"levels: expected 2 to {GREYS}, got {self.levels}")
        if self.channels not in (None, 1, 3):
            raise InputError(f"channels: expected 1 for grey or 3 for colours, got {self.channels}")

    def resolve(self, rows: Rows) -> Self:
        first = next(iter(rows))
        height, width = self.height or first["height"], self.width or first["width"]
        channels = self.channels or len(first["image"]) // (first["height"] * first["width"])
        return dataclasses.replace(self, height=height, width=width, channels=channels)

    def texts(self, rows: Rows) -> Iterator[str]:
        return iter(())

    def tokenizer(self, config: TokenizerConfig, rows: Rows) -> Tokenizer:
        """Levels are tokens as they are: nothing is learnt, and the recipe's tokenizer not used."""
        return Tokenizer.of_words([*map(str, range(self.levels)), "<s>"])

    def build(self, tokenizer: Tokenizer) -> "ImageModelling":
        return ImageModelling(self, tokenizer)


class ImageModelling(TextTask):
    """Metrics from `nats`, the sum of -ln P over every pixel of the held-out images:

    loss          nats / pixels
    bits_per_dim  loss / ln 2: comparable for one number of levels only; guessing evenly costs log2(levels)
    """

    stacks = "decoder"
    sums = 2
    head: HeadConfig = LanguageModelConfig()

    def __init__(self, config: ImageConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        if config.height is None or config.width is None:
            raise InputError("height, width: not known before the training images are; call resolve(rows)")
        # A run of before there were colours says nothing of channels.
        colours = () if config.channels in (None, 1) else (config.channels,)
        self.levels, self.shape = config.levels, (config.height, config.width, *colours)
        self.start = config.levels  # the id after the last level
        what = "a token more than an image has pixels" + (" of three colours" if colours else "")
        check_room(config.batch_tokens, what, self.positions)

    @property
    def positions(self) -> int:
        return math.prod(self.shape) + 1

    def adapt(self, config: ModelConfig) -> ModelConfig:
        for shape in shapes(config):
            if (shape[:-1] if len(shape) == 3 and shape[-1] == 1 else shape) != self.shape:
                expected, given = ("x".join(map(str, one)) for one in (self.shape, shape))
                raise InputError(
                    f"model: it is made for images of {given}, and the data's are {expected}; "
                    "give this shape to Local2D and to the grid of positions"
                )
        return super().adapt(config)

    def prepare(self, rows: Sequence[Row]) -> list[Row]:
        return [self._row(row) for row in rows]

    def _row(self, row: Row) -> Row:
        given = row["height"], row["width"]
        if given != self.shape[:2] or len(row["image"]) != math.prod(self.shape):
            expected = "x".join(map(str, self.shape))
            raise InputError(
                f"image: expected {expected} pixels, as the first training image has, got "
                f"{'x'.join(map(str, given))} and {len(row['image'])} bytes; bring the images to one size "
                "with data.image_size, and to grey or colours with data.image_mode (grey, rgb)"
            )
        ids = np.concatenate([[self.start], quantised(row["image"], self.levels)])
        return {"input_ids": ids, "labels": np.concatenate([[IGNORED], ids[1:]])}

    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        pixels = self.weight(batch)
        nats = model(**batch).loss.double() * pixels
        return torch.stack([nats, nats.new_tensor(pixels)])

    def metrics(self, totals: list[float], counts: dict[str, float]) -> dict[str, float]:
        loss = totals[0] / max(totals[1], 1)
        return {"loss": loss, "bits_per_dim": loss / math.log(2)}

    def complete(self, model: Transformer, rows: Rows, images: int, seed: int) -> Tensor:
        """Levels [3, images, height, width], with colours [..., 3]: the first images, their upper halves, and
        these completed.

        What is missing of a half is -1. Pixels are drawn from the model, the same for the same seed.
        """
        prepared = self.prepare(list(islice(rows, images)))
        real = torch.from_numpy(np.stack([row["input_ids"] for row in prepared]))
        known = 1 + self.shape[0] // 2 * math.prod(self.shape[1:])
        config = GenerationConfig(
            max_new_tokens=self.positions - known, sampling=SamplingConfig(do_sample=True, seed=seed)
        )
        device = next(model.parameters()).device
        made = model.generate(real[:, :known].to(device), None, config).sequences.cpu()
        half = real.clone()
        half[:, known:] = -1
        # A start token in the middle of an image is all but impossible after training; it is shown as white.
        made = made.clamp_max(self.levels - 1)
        return torch.stack([real, half, made])[:, :, 1:].reshape(3, len(real), *self.shape)


def shapes(config: object) -> Iterator[tuple[int, ...]]:
    """The image shapes that the parts of a model are made for."""
    if isinstance(config, Local2D | GridConfig):
        yield config.shape
    elif isinstance(config, tuple):
        for one in config:
            yield from shapes(one)
    elif dataclasses.is_dataclass(config):
        for field in dataclasses.fields(config):
            yield from shapes(getattr(config, field.name))
