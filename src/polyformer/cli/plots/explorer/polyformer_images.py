"""Images that models of polyformer read, as readings: a token per level of a pixel, or per patch."""

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from polyformer.cli.plots.explorer.reading import Picture, Prediction, Reading
from polyformer.core.errors import InputError
from polyformer.core.evaluation_mode import evaluating
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
