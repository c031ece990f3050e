"""Saving and loading of models, with the names of their labels and the record of their training.

The names of a model's labels: read with a model, and written with it in every format.

    labels.json     the names in the order of the logits, in a folder of our format
    recipe.yaml     task.labels, in the folder of a run
    config.json     id2label, in a folder for transformers

Other models of public families keep them in the fields of their configuration's origin.

The record of a model's training run, if it still holds for the weights.

A `TrainingRecord` is read with a model from the folder of its run. It is saved in the config.json for
transformers, and a model card reports the training data and the metrics from it. The metrics belong to the
weights with its digest, and no longer hold after further training.

The files of a saved model:

config.json               the configuration
model.safetensors         the weights, by their names in the module
generation_config.json    settings for `generate`, if the model has some
labels.json               the names of the labels, if they are known
unread.safetensors        tensors of a public checkpoint that no computation uses, if there are some
"""

import dataclasses
import hashlib
import importlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PureWindowsPath
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from polyformer.core.errors import InputError, quote, unknown
from polyformer.core.files import (
    atomic_write,
    folder_for_files,
    read_bounded,
    read_json,
    read_tensors,
    write_json,
    write_tensors,
)
from polyformer.core.parsing import parse_json, parse_yaml
from polyformer.core.paths import refuse_links
from polyformer.core.ranges import JSON_BYTES, YAML_BYTES
from polyformer.models.architectures.weights import (
    check_layers,
    check_trainable,
    load_weights,
    read_unused_tensors,
    write_unused_tensors,
)

LABELS = "labels.json"


def read_labels(folder: Path, description: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the labels in a folder; empty without names. description: its config.json."""
    if (folder / LABELS).is_file():
        names = read_json(folder / LABELS, list)
    elif (folder / RECIPE).is_file():
        path = folder / RECIPE
        recipe = parse_yaml(read_bounded(path, YAML_BYTES).decode("utf-8", "replace"), path)
        task = recipe.get("task") if isinstance(recipe, dict) else None
        names = (task.get("labels") if isinstance(task, dict) else None) or ()
    else:
        names = ordered(description.get("id2label"))
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise InputError(f"{folder}: expected a list of texts as the names of labels; restore the file")
    return tuple(names)


def ordered(names: object) -> tuple[str, ...]:
    """Return the names of `id2label` in the order of their numbers; empty if some number is missing."""
    if not isinstance(names, Mapping):
        return ()
    by_number = {str(number): str(name) for number, name in names.items()}
    numbers = [str(number) for number in range(len(by_number))]
    return tuple(by_number[number] for number in numbers) if {*numbers} == by_number.keys() else ()


def known_labels(model: Any) -> tuple[str, ...]:
    """Return the names of a model's labels, one for each logit of its head; empty if they are not known."""
    count = _count(model)
    origin = getattr(model.config, "origin", None)
    for names in (model.labels, ordered(origin.fields.get("id2label")) if origin is not None else ()):
        if names and len(names) == count:
            return tuple(names)
    return ()


def label_names(model: Any) -> tuple[str, ...]:
    """Return the names of a model's labels; LABEL_0, ... if they are not known, as in transformers."""
    return known_labels(model) or tuple(f"LABEL_{number}" for number in range(_count(model)))


def _count(model: Any) -> int:
    return getattr(getattr(model.config, "head", None), "num_labels", 0)


def hub_labels(labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the fields of a config.json for transformers: `id2label` and `label2id`."""
    numbered = {str(number): name for number, name in enumerate(labels)}
    return {"id2label": numbered, "label2id": {name: number for number, name in enumerate(labels)}}


def write_labels(model: Any, folder: Path) -> None:
    """Write labels.json of a model in our format, if it has names that its configuration does not have."""
    if model.labels:
        write_json(folder / LABELS, list(model.labels))


# The files of a run's folder: the resolved recipe; and versions, data and metrics.
RECIPE, RECORD = "recipe.yaml", "run.json"


@dataclasses.dataclass(frozen=True)
class TrainingRecord:
    """`recipe`: as in recipe.yaml, without directories; `metrics` by split; `weights`: their digest."""

    recipe: dict[str, Any]
    metrics: dict[str, dict[str, float]]
    weights: str

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for config.json."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Return the record that `to_dict` wrote; raises `InputError` for other data."""
        names = {"recipe": dict, "metrics": dict, "weights": str}
        if not isinstance(data, dict) or data.keys() != names.keys():
            raise InputError(f"training_record: expected {', '.join(names)}, got {quote(data)}")
        for name, kind in names.items():
            if not isinstance(data[name], kind):
                raise InputError(
                    f"training_record.{name}: expected a {kind.__name__}, got {quote(data[name])}"
                )
        return cls(**data)

    def holds_for(self, tensors: Mapping[str, Tensor]) -> bool:
        """Return whether the metrics were measured with the weights `tensors`."""
        return digest(tensors) == self.weights


def read_record(folder: Path, tensors: Mapping[str, Tensor]) -> TrainingRecord | None:
    """Return the record of the run in `folder` that produced `tensors`; None if no run ended there."""
    if not (folder / RECIPE).is_file() or not (folder / RECORD).is_file():
        return None
    # Perplexities may be infinite.
    facts = parse_json(read_bounded(folder / RECORD, JSON_BYTES), folder / RECORD, dict, finite=False)
    recipe = parse_yaml(read_bounded(folder / RECIPE, YAML_BYTES).decode("utf-8", "replace"), folder / RECIPE)
    metrics = facts.get("metrics")
    if not isinstance(metrics, dict) or not isinstance(recipe, dict):
        return None
    return TrainingRecord(without_directories(recipe), metrics, digest(tensors))


def without_directories(part: Any) -> Any:
    """Return `part` of a recipe with only the file names of absolute paths; directories are private."""
    if isinstance(part, dict):
        return {name: without_directories(value) for name, value in part.items()}
    if isinstance(part, list):
        return [without_directories(value) for value in part]
    if isinstance(part, str):
        # A recipe may come from another system.
        for path in (Path(part), PureWindowsPath(part)):
            if path.is_absolute() or part.startswith("~"):
                return path.name
    return part


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of names, types, shapes and numbers; empty if some are not in memory (`meta`)."""
    # Offloaded weights have no bytes to hash.
    if any(tensor.is_meta for tensor in tensors.values()):
        return ""
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        # numpy has no bfloat16, so the bytes are hashed.
        flat = tensor.detach().cpu().contiguous().flatten()
        total.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    return total.hexdigest()


def metric_rows(metrics: Mapping[str, Mapping[str, Any]]) -> Iterable[tuple[str, str, float]]:
    """Yield (split, metric, value) for all values that are numbers."""
    for split, values in metrics.items():
        for name, value in values.items() if isinstance(values, Mapping) else ():
            if isinstance(value, int | float):
                yield split, name, float(value)


CONFIG, WEIGHTS, GENERATION = "config.json", "model.safetensors", "generation_config.json"

# The file formats, and the module with the `save` function of each, imported when it is needed.
FORMATS = {"polyformer": "polyformer.models.architectures.pretrained", "hub": "polyformer.models.checkpoints"}


class PretrainedMixin(nn.Module):
    """A model that is built only from its `config`, of the class `config_type`.

    generation: settings for `generate`, as in generation_config.json; None for the defaults.
    unused_tensors: tensors of the model's public checkpoint that no computation uses, by name; see
    `polyformer.models.architectures.weights`.
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
