"""The record of a model's training run, if it still holds for the weights.

A `TrainingRecord` is read with a model from the folder of its run. It is saved in the config.json for
transformers, and a model card reports the training data and the metrics from it. The metrics belong to the
weights with its digest, and no longer hold after further training.
"""

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path, PureWindowsPath
from typing import Any, Self

import torch
from torch import Tensor

from polyformer.core.errors import InputError, quote
from polyformer.core.files import read_bounded
from polyformer.core.limits import JSON_BYTES, YAML_BYTES
from polyformer.core.parsing import parse_json, parse_yaml

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
