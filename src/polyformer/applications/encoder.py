"""Models that compute one vector per text, or per text and image in one space.

A model of texts has a tokenizer, a pooling and a maximum length. Reimers and Gurevych 2019, section 3:
v = pool(h), scaled to length 1. The head `embed` or a folder of sentence-transformers defines pooling and
scaling; other models require the name of a pooling.

A model of two towers, such as CLIP, has vectors of texts and of images that can be compared.
"""

import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import normalizers
from torch import Tensor

from polyformer.applications.retrieval.readers import changed_settings, model_fingerprint
from polyformer.core.errors import InputError
from polyformer.core.files import read_json
from polyformer.core.foreign_checkpoints import gguf_file
from polyformer.core.ops.layers import pool
from polyformer.data import DataConfig, read
from polyformer.data.formats.images import SUFFIXES, picture_row
from polyformer.data.sources.checks import fingerprint
from polyformer.data.tokenizers import load_tokenizer
from polyformer.models.architectures import TowersConfig, Transformer, TwoTowers
from polyformer.models.architectures.pretrained import CONFIG
from polyformer.models.checkpoints import config_of
from polyformer.models.checkpoints.folder_files import TextReading, embedding_head, text_reading
from polyformer.models.checkpoints.load import WRAPPED
from polyformer.models.config import ModelConfig, max_positions
from polyformer.nn.heads import EmbedConfig
from polyformer.training.recipes.reader import LABELLED, MARKS, collation, set_special_tokens
from polyformer.training.recipes.run import is_checkpoint, open_model
from polyformer.training.tasks.text import batched


class Vectors(NamedTuple):
    """Vectors [texts, E] in float32, and the indices of the texts that were truncated."""

    vectors: Tensor
    cut: list[int]


class Encoder:
    """A text encoder from `folder`, a run or a checkpoint.

    Args:
        pooling: first, last, mean or max of the last hidden states, of the encoder's in an encoder-decoder;
            None: as in the model's head `embed`, or in its folder.
        normalize: with a `pooling`, whether vectors are scaled to length 1.
        max_length: the most tokens per text, including special tokens; longer texts are truncated. None: the
            limit of the folder, or of the model.
        prompt_name: a prompt of the folder, which precedes every text; None: its default prompt, if any.
        batch_tokens: tokens per batch, including padding.
        model: with a `pooling`, the model in `folder` if it is already loaded.

    Raises:
        InputError: no pooling is defined or it is defined twice, no tokenizer, or a `max_length` beyond the
            model's limit.
    """

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        pooling: str | None = None,
        normalize: bool = True,
        max_length: int | None = None,
        batch_tokens: int = 4096,
        prompt_name: str | None = None,
        model: Transformer | None = None,
    ):
        if max_length is not None and max_length < 2:
            raise InputError(f"max_length: expected 2 tokens or more, got {max_length}")
        if batch_tokens < 1:
            raise InputError(f"batch_tokens: expected 1 or more, got {batch_tokens}")
        options = {"pooling": pooling, "normalize": normalize}
        self.head = None if pooling is None else EmbedConfig.from_dict(options)
        self.model = _model(folder, device, self.head) if model is None or pooling is None else model
        config = self.model.config
        assert isinstance(config, ModelConfig)
        self.config, self.tokenizer, self.batch_tokens = config, load_tokenizer(folder), batch_tokens
        self.reading = text_reading(folder, prompt_name)
        self.max_length = _length(folder, config, self.reading, max_length)
        if config.origin is None and self.tokenizer.backend.post_processor is None:
            set_special_tokens(self.tokenizer, *(MARKS["generate"] if config.encoder is None else LABELLED))
        if self.reading.lowercase:
            marking, lower = self.tokenizer.marking, normalizers.Lowercase()
            before = marking.normalizer
            marking.normalizer = lower if before is None else normalizers.Sequence([lower, before])
        if self.max_length is not None:
            self.tokenizer.marking.enable_truncation(self.max_length)
        self.collate, self.first = collation(config, self.tokenizer)

    @cached_property
    def width(self) -> int:
        """Return E, the numbers per vector."""
        return self.config.hidden_size

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """Return the properties that determine the vectors of texts: plain data, equal for equal encoders."""
        return {
            "model": model_fingerprint(self.model, changed_settings(self.config)),
            "tokenizer": self.tokenizer.fingerprint,
            "head": (self.head or self.config.head).to_dict(),
            "max_length": self.max_length,
            "batch_tokens": self.batch_tokens,
            **({"lowercase": True} if self.reading.lowercase else {}),
            **({"prompt": self.reading.prompt} if self.reading.prompt else {}),
        }

    @torch.no_grad()
    def vectors(self, texts: Sequence[str]) -> Vectors:
        """Return the vector of each text, in order; the batches contain texts of similar lengths."""
        prompt = self.reading.prompt
        encoded = self.tokenizer.marking.encode_batch_fast([prompt + text for text in texts])
        cut = [number for number, encoding in enumerate(encoded) if encoding.overflowing]
        vectors = torch.empty(len(texts), self.width)
        rows: list[Any] = [encoding.ids or [self.first] for encoding in encoded]
        for numbers, batch in batched(self.model, rows, self.collate, self.batch_tokens):
            vectors[numbers] = self._pooled(batch).float().cpu()
        return Vectors(vectors, cut)

    def _pooled(self, batch: dict[str, Tensor]) -> Tensor:
        if self.head is None:
            return self.model(**batch).logits
        if self.config.encoder is not None and self.config.decoder is not None:
            hidden = self.model.encode(batch["input_ids"], batch.get("attention_mask")).source
            assert hidden is not None
        else:
            hidden = self.model(**batch).last_hidden_state
        mask = batch.get("attention_mask")
        vectors = pool(hidden, None if mask is None else mask.bool(), self.head.pooling)
        return F.normalize(vectors, dim=-1) if self.head.normalize else vectors


def _model(folder: Path, device: torch.device, head: EmbedConfig | None) -> Transformer:
    """Load the model, which must have the head `embed` unless another `head` is given.

    The head of a public checkpoint is used only if its folder defines the pooling: transformers adds a pooler
    to models that were never trained to embed.
    """
    if not folder.exists():
        raise InputError(f"{folder}: no such directory; expected a run, or the folder of a checkpoint")
    saved = None if head is not None else saved_pooling(folder)
    model = open_model(folder, device.type, saved).to(device)
    if not isinstance(model.config, ModelConfig):
        raise InputError(f"{folder}: not a model of texts")
    if head is None and not isinstance(model.config.head, EmbedConfig):
        raise _missing_pooling(folder)
    return model


def saved_pooling(folder: Path) -> EmbedConfig | None:
    """Return the pooling of a folder of sentence-transformers; None if the head of the model defines it.

    Raises `InputError` for another public checkpoint, which has no pooling.
    """
    if not is_checkpoint(folder):
        return None
    if gguf_file(folder) is not None:
        raise _missing_pooling(folder)
    if read_json(folder / CONFIG, dict).get("model_type", WRAPPED) == WRAPPED:
        return None
    saved = embedding_head(folder)
    if saved is None:
        raise _missing_pooling(folder)
    return saved


def _missing_pooling(folder: Path) -> InputError:
    return InputError(
        f"{folder}: neither model nor folder defines a pooling; choose it with --pooling mean, first, last "
        "or max (in Python pooling=...)"
    )


def _length(folder: Path, config: ModelConfig, reading: TextReading, asked: int | None) -> int | None:
    """Return the most tokens per text; None for no limit."""
    most = max_positions(config)
    if asked is not None:
        if most is not None and asked > most:
            raise InputError(f"max_length: expected at most {most}, the limit of {folder}, got {asked}")
        return asked
    limits = [limit for limit in (most, reading.most) if limit is not None]
    return min(limits, default=None)


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
