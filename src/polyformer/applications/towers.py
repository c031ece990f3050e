"""Vectors of texts and of images by a model of two towers, such as CLIP: one space, so that they compare."""

import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyformer.applications.encoder import Vectors
from polyformer.applications.retrieval.readers import changed_settings, model_fingerprint
from polyformer.core.errors import InputError
from polyformer.core.foreign_checkpoints import gguf_file
from polyformer.data import DataConfig, read
from polyformer.data.formats.images import SUFFIXES, picture_row
from polyformer.data.sources.checks import fingerprint
from polyformer.data.tokenizers import load_tokenizer
from polyformer.models.architectures import TowersConfig, TwoTowers
from polyformer.models.checkpoints import config_of
from polyformer.training.recipes.run import is_checkpoint, open_model

BATCH = 32
"""Texts or images of a batch."""


def has_towers(folder: Path) -> bool:
    """Return whether a folder contains a model of texts and images."""
    if not folder.is_dir() or not is_checkpoint(folder) or gguf_file(folder) is not None:
        return False
    config: Any = config_of(folder)
    return isinstance(config, TowersConfig)


def image_files(names: Sequence[str]) -> list[str]:
    """Return the image files that names, patterns and folders describe, the files of a folder in order."""
    files: list[str] = []
    for name in names:
        folder = Path(name)
        if folder.is_dir():
            inside = sorted(file for file in folder.rglob("*") if file.suffix.lower() in SUFFIXES)
            if not inside:
                raise InputError(f"{name}: a folder without images; expected {', '.join(SUFFIXES)}")
            files += [str(file) for file in inside]
        else:
            files += sorted(glob.glob(name)) if not folder.exists() and glob.glob(name) else [name]
    return files


@dataclass(frozen=True)
class Pictures:
    """Image files, each with its name as the id."""

    files: tuple[str, ...]

    @classmethod
    def of(cls, names: Sequence[str]) -> "Pictures | None":
        """Return the image files of these names; None for files of texts. Raises `InputError` for both."""
        if not any(Path(name).is_dir() or name.lower().endswith(SUFFIXES) for name in names):
            return None
        files = image_files(names)
        others = [file for file in files if not file.lower().endswith(SUFFIXES)]
        if others:
            raise InputError(f"FILE: {others[0]} is no image, and others are; embed texts and images apart")
        return cls(tuple(files))

    @property
    def name(self) -> str:
        """Return the name of the images in messages."""
        return ", ".join(self.files[:3])

    def rows(self) -> Iterator[tuple[int | str, str]]:
        """Yield the id and the file of every image."""
        return ((file, file) for file in self.files)

    def fingerprint(self) -> dict[str, Any]:
        """Return plain data that describes the images: equal for equal files."""
        prints = [fingerprint(DataConfig(path=file), ("image",))["path"] for file in self.files]
        return {"images": [[about[0]["sha256"], name] for about, name in zip(prints, self.files)]}


class TowerEncoder:
    """The vectors of texts, or of image files, by the model of two towers in `folder`.

    images: whether it reads images. model: the model in `folder`, if it is already loaded.
    """

    def __init__(
        self, folder: Path, device: torch.device, *, images: bool = False, model: TwoTowers | None = None
    ):
        opened: Any = open_model(folder, device.type).to(device) if model is None else model
        self.model: TwoTowers = opened
        self.images, self.folder = images, folder
        self.max_length = None if images else self.model.config.text.max_position_embeddings
        self.width = self.model.width

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the text tower, which truncates texts."""
        tokenizer = load_tokenizer(self.folder)
        tokenizer.marking.enable_truncation(self.model.config.text.max_position_embeddings)
        return tokenizer

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """Return the properties that determine the vectors: plain data, equal for equal encoders."""
        own = {"model": model_fingerprint(self.model, changed_settings(self.model.config))}
        return {**own, "images": True} if self.images else {**own, "tokenizer": self.tokenizer.fingerprint}

    def vectors(self, items: Sequence[Any]) -> Vectors:
        """Return the vectors of texts, or of images: names of files or images of Pillow."""
        if self.images:
            return Vectors(self.of_images(items), [])
        return self.of_texts(items)

    @torch.no_grad()
    def of_texts(self, texts: Sequence[str]) -> Vectors:
        """Return the vectors of texts, and the indices of the texts that were truncated."""
        config = self.model.config
        encoded = self.tokenizer.marking.encode_batch_fast([*texts])
        cut = [number for number, encoding in enumerate(encoded) if encoding.overflowing]
        rows = [list(encoding.ids) for encoding in encoded]
        vectors, device = torch.empty(len(rows), self.width), self.model.scale.device
        for start in range(0, len(rows), BATCH):
            batch = rows[start : start + BATCH]
            most = config.text.max_position_embeddings if config.pads_texts else max(map(len, batch))
            pad = config.text.special.pad or 0
            ids = torch.tensor([row + [pad] * (most - len(row)) for row in batch], device=device)
            real = torch.tensor([[1] * len(row) + [0] * (most - len(row)) for row in batch], device=device)
            own = self.model.encode_texts(ids, None if config.pads_texts else real)
            vectors[start : start + BATCH] = own.float().cpu()
        return Vectors(vectors, cut)

    @torch.no_grad()
    def of_images(self, images: Sequence[Any]) -> Tensor:
        """Return the vectors of images: their centre in the proportions and the size of the model."""
        vectors, device = torch.empty(len(images), self.width), self.model.scale.device
        for start in range(0, len(images), BATCH):
            pixels = torch.stack([self._pixels(image) for image in images[start : start + BATCH]])
            normal = self.model.image.normalize(pixels.to(device))
            vectors[start : start + BATCH] = self.model.encode_images(normal).float().cpu()
        return vectors

    def _pixels(self, image: Any) -> Tensor:
        """Return the bytes [H, W, C] of an image."""
        config = self.model.config.image
        mode = "grey" if config.num_channels == 1 else "rgb"
        if isinstance(image, str | Path):
            reading = DataConfig(image_size=config.image_size, image_mode=mode, streaming=True)
            row: Any = next(iter(read(reading, ("image", "height", "width"), str(image))))
        else:
            row = picture_row(image, config.image_size, mode)
        shape = row["height"], row["width"], config.num_channels
        return torch.from_numpy(np.frombuffer(row["image"], np.uint8).reshape(shape).copy())
