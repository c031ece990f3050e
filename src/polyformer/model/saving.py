"""Models in folders: `save_pretrained` and `from_pretrained`, the same for every model.

config.json               the configuration
model.safetensors         the weights, by their names in the module
generation_config.json    settings for `generate`, where the model came with some
unread.safetensors        tensors of a public checkpoint that no number depends on, where there are some
"""

import importlib
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from polyformer.core.errors import InputError, unknown
from polyformer.core.files import atomic_write, read_json, read_tensors, write_json, write_tensors
from polyformer.core.unused_tensors import read_unused_tensors, write_unused_tensors
from polyformer.core.weights import check_layers, load_weights
from polyformer.model.record import TrainingRecord, read_record
from polyformer.model.weights import check_trainable

CONFIG, WEIGHTS, GENERATION = "config.json", "model.safetensors", "generation_config.json"

FORMATS = {"polyformer": "polyformer.model.saving", "hub": "polyformer.checkpoints"}
"""Formats of files, and the module whose `save` writes them, found when it is needed."""


class PretrainedMixin(nn.Module):
    """A model that is built from its `config`, of the class `config_type`, and from nothing else.

    generation: settings for `generate`, as generation_config.json holds them; None for the defaults.
    unused_tensors: tensors that the model's public checkpoint has and never computes with, by name; see
    `polyformer.core.unused_tensors`.
    record: of the run that the model was loaded from, for its card; None without one.
    folder: where it was loaded from, which may hold its tokenizer; None of a model that was built.
    """

    config_type: ClassVar[Any]

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        self.generation: dict[str, Any] | None = None
        self.unused_tensors: dict[str, Tensor] = {}
        self.record: TrainingRecord | None = None
        self.folder: Path | None = None

    def save_pretrained(self, directory: str | Path, format: str = "polyformer") -> None:
        """Write config.json and model.safetensors into `directory`, each whole or not at all.

        `format`: "polyformer", which holds any model, or "hub", which transformers reads: for models that
        are of one of its families (`polyformer.checkpoints`).
        Raises `InputError` for a model that is of none.
        """
        if format not in FORMATS:
            raise unknown("format", format, FORMATS)
        importlib.import_module(FORMATS[format]).save(self, Path(directory))

    def train(self, mode: bool = True) -> Self:
        """As torch's; `InputError` for weights that cannot be trained."""
        if mode:
            check_trainable(self)
        return super().train(mode)

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> Self:
        """The model that `save_pretrained` wrote, in evaluation mode; `InputError` for anything else."""
        folder = Path(directory)
        if not (folder / CONFIG).is_file():
            raise InputError(f"{folder}: not a model directory (it has no {CONFIG})")
        config = cls.config_type.from_dict(read_json(folder / CONFIG, dict))
        tensors = read_tensors(folder / WEIGHTS)
        check_layers(config, len(tensors), folder / WEIGHTS)
        with torch.device("meta"):
            model = cls(config)
        load_weights(model, tensors, folder / WEIGHTS)
        model.generation, model.unused_tensors = read_generation(folder), read_unused_tensors(folder)
        model.record, model.folder = read_record(folder, model.state_dict()), folder
        return model.eval()


def save(model: PretrainedMixin, folder: Path) -> None:
    """Write `model` in the format of this library."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / WEIGHTS, dict(model.state_dict()))
    save_beside_weights(model, folder)


def save_beside_weights(model: PretrainedMixin, folder: Path) -> None:
    """Write all that `save` does but the weights, which must be in `folder` already: config.json says to
    those who look that a model is there, so it comes last."""
    write_generation(model, folder)
    write_unused_tensors(model.unused_tensors, folder)
    atomic_write(folder / CONFIG, model.config.to_json().encode())


def read_generation(folder: Path) -> dict[str, Any] | None:
    """The settings for `generate` in a model's directory, where there are any."""
    return read_json(folder / GENERATION, dict) if (folder / GENERATION).is_file() else None


def write_generation(model: PretrainedMixin, folder: Path) -> None:
    """Write the model's settings for `generate` into its directory, where it has any."""
    if model.generation is not None:
        write_json(folder / GENERATION, model.generation)
