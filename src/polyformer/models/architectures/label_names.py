"""The names of a model's labels: read with a model, and written with it in every format.

    labels.json     the names in the order of the logits, in a folder of our format
    recipe.yaml     task.labels, in the folder of a run
    config.json     id2label, in a folder for transformers

Other models of public families keep them in the fields of their configuration's origin.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyformer.core.errors import InputError
from polyformer.core.files import read_bounded, read_json, write_json
from polyformer.core.limits import YAML_BYTES
from polyformer.core.parsing import parse_yaml
from polyformer.models.architectures.training_record import RECIPE

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
