"""Saving and loading of models: `save_pretrained` and `from_pretrained`, the same for every model.

config.json               the configuration
model.safetensors         the weights, by their names in the module
generation_config.json    settings for `generate`, if the model has some
labels.json               the names of the labels, if they are known
unread.safetensors        tensors of a public checkpoint that no computation uses, if there are some
"""

import importlib
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from polyformer.core.errors import InputError, unknown
from polyformer.core.files import (
    atomic_write,
    folder_for_files,
    read_json,
    read_tensors,
    write_json,
    write_tensors,
)
from polyformer.core.paths import refuse_links
from polyformer.models.architectures.label_names import read_labels, write_labels
from polyformer.models.architectures.training_record import TrainingRecord, read_record
from polyformer.models.architectures.weight_files import (
    check_layers,
    load_weights,
    read_unused_tensors,
    write_unused_tensors,
)
from polyformer.models.architectures.weights import check_trainable

CONFIG, WEIGHTS, GENERATION = "config.json", "model.safetensors", "generation_config.json"

# The file formats, and the module with the `save` function of each, imported when it is needed.
FORMATS = {"polyformer": "polyformer.models.architectures.pretrained", "hub": "polyformer.models.checkpoints"}


class PretrainedMixin(nn.Module):
    """A model that is built only from its `config`, of the class `config_type`.

    generation: settings for `generate`, as in generation_config.json; None for the defaults.
    unused_tensors: tensors of the model's public checkpoint that no computation uses, by name; see
    `polyformer.models.architectures.weight_files`.
    record: of the run from which the model was loaded, for its card; None without a run.
    labels: the names of its labels; empty if they are not known, or only in the origin of its configuration.
    folder: the folder from which it was loaded, which may contain its tokenizer; None for a new model.
    """

    config_type: ClassVar[Any]

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        self.generation: dict[str, Any] | None = None
        self.unused_tensors: dict[str, Tensor] = {}
        self.record: TrainingRecord | None = None
        self.labels: tuple[str, ...] = ()
        self.folder: Path | None = None

    def save_pretrained(self, directory: str | Path, format: str = "polyformer") -> None:
        """Write config.json and model.safetensors into `directory`, each file completely or not at all.

        `format`: "polyformer", for any model, or "hub", which transformers reads, for models that belong to
        one of its families (`polyformer.models.checkpoints`).
        Raises `InputError` for a model that belongs to none.
        """
        if format not in FORMATS:
            raise unknown("format", format, FORMATS)
        # Imported here, because the families import all presets.
        importlib.import_module(FORMATS[format]).save(self, Path(directory))

    def train(self, mode: bool = True) -> Self:
        """Set the mode as in torch; raises `InputError` for weights that cannot be trained."""
        if mode:
            check_trainable(self)
        return super().train(mode)

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> Self:
        """Return the saved model in evaluation mode; raises `InputError` for other folders."""
        folder = Path(directory)
        if not (folder / CONFIG).is_file():
            raise InputError(f"{folder}: not a model directory (it has no {CONFIG})")
        refuse_links(folder)
        description = read_json(folder / CONFIG, dict)
        config = cls.config_type.from_dict(description)
        tensors = read_tensors(folder / WEIGHTS)
        check_layers(config, len(tensors), folder / WEIGHTS)
        # The tensors of the file are assigned, so no new weights are allocated.
        with torch.device("meta"):
            model = cls(config)
        load_weights(model, tensors, folder / WEIGHTS)
        model.generation, model.unused_tensors = read_generation(folder), read_unused_tensors(folder)
        model.record, model.folder = read_record(folder, model.state_dict()), folder
        model.labels = read_labels(folder, description)
        return model.eval()


def save(model: PretrainedMixin, folder: Path) -> None:
    """Write `model` in the format of this library."""
    with folder_for_files(folder):
        write_tensors(folder / WEIGHTS, dict(model.state_dict()))
        save_config_files(model, folder)


def save_config_files(model: PretrainedMixin, folder: Path) -> None:
    """Write the files of `save` except the weights, which must already be in `folder`: config.json marks a
    folder as a model, so it is written last."""
    write_generation(model, folder)
    write_unused_tensors(model.unused_tensors, folder)
    write_labels(model, folder)
    atomic_write(folder / CONFIG, model.config.to_json().encode())


def read_generation(folder: Path) -> dict[str, Any] | None:
    """Return the settings for `generate` in a model's directory; None if there are none."""
    return read_json(folder / GENERATION, dict) if (folder / GENERATION).is_file() else None


def write_generation(model: PretrainedMixin, folder: Path) -> None:
    """Write the model's settings for `generate` into its directory, if it has some."""
    if model.generation is not None:
        write_json(folder / GENERATION, model.generation)
