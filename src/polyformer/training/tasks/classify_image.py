"""Image classification: assign a label to an image, by a Vision Transformer; with accuracy and macro F1.

Training images are augmented randomly (`task.augmentation`). Pixels are normalized by the mean and the
standard deviation of each channel of the training images, which are saved in the model's configuration.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn

from polyformer.core.errors import InputError
from polyformer.core.ranges import PositiveInt
from polyformer.data.formats.images import AugmentationConfig, viewed
from polyformer.data.rows import Batch, Batches, Corrupt, Row, by_rows
from polyformer.models.architectures import VisionConfig
from polyformer.nn.heads import ClassifyConfig, HeadConfig
from polyformer.training.tasks.base import HeldOut, Rows, TaskConfig, TaskRows
from polyformer.training.tasks.image import by
from polyformer.training.tasks.labels import Confusion, Labels, SingleLabelTask, check_labels, labels_of

Numbers = tuple[float, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageClassificationConfig(TaskConfig):
    """Image classification: assign a label to an image.

    Options of None are taken from the training images.
    """

    labels: tuple[str, ...] | None = None  # sorted
    batch_size: PositiveInt = 64  # images in a batch
    image_size: tuple[int, int] | None = None  # height and width
    channels: int | None = None  # 1 for grey, 3 for colours
    mean: Numbers | None = None  # of each channel, from 0 to 1
    std: Numbers | None = None
    augmentation: AugmentationConfig = AugmentationConfig()

    needs: ClassVar[tuple[str, ...]] = ("image", "height", "width", "label")
    kind: ClassVar[str] = "classify_image"
    paper: ClassVar[str] = "Dosovitskiy et al. 2021 (ViT)"

    def __post_init__(self) -> None:
        check_labels(self.labels)
        if self.batch_tokens != TaskConfig.batch_tokens:
            raise InputError("batch_tokens: a batch is counted in images here; set batch_size")
        if self.channels not in (None, 1, 3):
            raise InputError(f"channels: expected 1 for grey or 3 for colours, got {self.channels}")

    def resolve(self, rows: Rows) -> Self:
        """Return this with the labels, the size, the mean and the deviation of the training images."""
        if not hasattr(rows, "__len__"):
            raise InputError("data.streaming: images are held in memory; set it to false")
        first = next(iter(rows))
        size = self.image_size or (first["height"], first["width"])
        channels = self.channels or len(first["image"]) // (first["height"] * first["width"])
        folder = "put images of another label in a folder next to it"
        pixels = "or train a model of pixels with --task.kind image"
        labels = self.labels or labels_of(rows, "image", f"{folder}, {pixels}")
        sized = dataclasses.replace(self, labels=labels, image_size=size, channels=channels)
        if sized.mean is not None and sized.std is not None:
            return sized
        mean, std = statistics([sized.pixels(row) for row in rows])
        return dataclasses.replace(sized, mean=sized.mean or mean, std=sized.std or std)

    def pixels(self, row: Row) -> np.ndarray:
        """Return the image of a row, uint8 [H, W, C]; raise `InputError` for another size."""
        assert self.image_size is not None
        assert self.channels is not None
        shape = (*self.image_size, self.channels)
        size = row["height"], row["width"]
        if size != self.image_size or len(row["image"]) != size[0] * size[1] * self.channels:
            channels = len(row["image"]) // max(size[0] * size[1], 1)
            raise InputError(
                f"image: expected {by(shape)} pixels, as the first training image has, got "
                f"{by((*size, channels))}; bring the images to one size with data.image_size "
                "([height, width]), and to grey or colours with data.image_mode (grey, rgb)"
            )
        return np.frombuffer(row["image"], np.uint8).reshape(shape)


class LabelledImages(TaskRows):
    """Batches of images of one size, the training images through random views."""

    def __init__(self, config: ImageClassificationConfig, labels: Labels):
        super().__init__()
        if config.image_size is None or config.mean is None or config.std is None:
            raise InputError("image_size: not known before the training images are; call resolve(rows)")
        self.config, self.labels, self.size = config, labels, config.image_size
        self.mean, self.std = (
            torch.tensor(numbers).view(1, -1, 1, 1) for numbers in (config.mean, config.std)
        )
        self.corrupt: Corrupt | None = self.with_view if config.augmentation.changes else None

    def training_batches(self, rows: Any, seed: int) -> Batches:
        """Return batches of `rows` in random order, each image with a random view."""
        plan, prepared = partial(by_rows, batch_size=self.config.batch_size), self.prepare(rows)
        self.notes.append(
            f"{len(prepared):,} images of {by(self.size)} with {len(self.labels)} labels to train on"
        )
        return Batches(prepared, plan, self.collate, seed, corrupt=self.corrupt)

    def held_out(self, rows: Rows) -> HeldOut:
        """Return `rows` in order, without augmentation."""
        plan, prepared = partial(by_rows, batch_size=self.config.batch_size), self.prepare(rows)
        self.notes.append(f"{len(prepared):,} images held out")
        return HeldOut(Batches(prepared, plan, self.collate, shuffle=False), {})

    def prepare(self, rows: Rows) -> list[Row]:
        """Return the pixels and the number of the label of each row."""
        return [{"image": self.config.pixels(row), "labels": self.labels.number_of_row(row)} for row in rows]

    def with_view(self, row: Row, generator: np.random.Generator) -> Row:
        """Return a row with a random view of its image."""
        return {**row, "view": self.config.augmentation.view(self.size, generator)}

    def collate(self, rows: Sequence[Row]) -> Batch:
        """Return `pixel_values` [B, C, H, W], through the views of the rows and normalized, and `labels`."""
        images = torch.from_numpy(np.stack([row["image"] for row in rows])).permute(0, 3, 1, 2)
        pixels = images.contiguous() / 255
        if "view" in rows[0]:
            pixels = viewed(pixels, torch.from_numpy(np.stack([row["view"] for row in rows])))
        batch = {"pixel_values": (pixels - self.mean) / self.std}
        if "labels" in rows[0]:
            batch["labels"] = torch.tensor([row["labels"] for row in rows])
        return batch


@dataclasses.dataclass(frozen=True)
class ImageArchitecture:
    """The image model of a classification: its size, channels, normalization and number of labels."""

    config: ImageClassificationConfig
    labels: int

    def adapt(self, config: Any) -> VisionConfig:
        """Return `config`, of an image model, with the size, the channels and the labels of the task."""
        if not isinstance(config, VisionConfig):
            raise InputError("model: this task needs a model of images, such as the preset vit-mini")
        return dataclasses.replace(
            config,
            image_size=self.config.image_size,
            num_channels=self.config.channels,
            mean=self.config.mean,
            std=self.config.std,
            head=fitted_head(config.head, self.labels, config.class_token),
        )


class ImageClassification(SingleLabelTask, config=ImageClassificationConfig):
    """Classification of an image, measured by `Confusion`."""

    config: ImageClassificationConfig
    rows: LabelledImages
    unit = "images"

    def __init__(self, config: ImageClassificationConfig, tokenizer: None = None):
        labels = Labels(config.labels)
        self.labels = labels.names
        super().__init__(
            config,
            rows=LabelledImages(config, labels),
            architecture=ImageArchitecture(config, len(labels)),
            metrics=Confusion(labels),
        )

    @torch.no_grad()
    def probabilities(self, model: nn.Module, rows: Sequence[Row]) -> Tensor:
        """Return the probability [rows, labels] of each label of the rows' images."""
        device, images = next(model.parameters()).device, iter(rows)
        results = [torch.zeros(0, len(self.labels))]
        while batch := [*itertools.islice(images, self.config.batch_size)]:
            pixels = self.rows.collate([{"image": self.config.pixels(row)} for row in batch])["pixel_values"]
            results.append(model(pixels.to(device)).logits.softmax(-1).float().cpu())
        return torch.cat(results)

    def classify(self, model: nn.Module, rows: Sequence[Row]) -> list[dict[str, float]]:
        """Return the probability of each label for the image of every row."""
        return [dict(zip(self.labels, shares)) for shares in self.probabilities(model, rows).tolist()]


def statistics(images: Sequence[np.ndarray]) -> tuple[Numbers, Numbers]:
    """Return the mean and the standard deviation of each channel of images [H, W, C] of bytes, from 0 to 1.

    They are computed from integer counts, and therefore independent of the order. A channel with only a
    single level has the deviation 1.
    """
    counts = np.zeros((images[0].shape[2], 256), np.int64)
    for image in images:
        for channel, levels in enumerate(counts):
            levels += np.bincount(image[..., channel].ravel(), minlength=256)
    shares, levels = counts / counts.sum(1, keepdims=True), np.arange(256) / 255
    mean = shares @ levels
    std = np.sqrt(np.maximum((shares * (levels - mean[:, None]) ** 2).sum(1), 0))
    return tuple(mean.tolist()), tuple(np.where(std > 0, std, 1.0).tolist())


def fitted_head(head: HeadConfig, labels: int, class_token: bool) -> HeadConfig:
    """Return the head of the model with one logit for each label, or else a classification head."""
    if any(field.name == "num_labels" for field in dataclasses.fields(head)):
        return dataclasses.replace(head, num_labels=labels)  # type: ignore[call-arg]
    pooling = "first" if class_token else "mean"
    return ClassifyConfig(num_labels=labels, hidden=False, dropout=0.0, pooling=pooling)
