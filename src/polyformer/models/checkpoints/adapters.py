"""Models with the low-rank adapter of a run, merged.

    W' = W + (alpha / r) B A          A [r, in], B [out, r]

The folder has the adapter in peft's files, the configuration of the model, and no other weights; the adapter
names the model that it changes. Hu et al. 2022 (LoRA), section 4.1.

adapter_config.json          rank, alpha, and the path or name of the model (base_model_name_or_path)
adapter_model.safetensors    base_model.model.NAME.lora_A.weight and .lora_B.weight for each module NAME
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyformer.core.errors import InputError, quote
from polyformer.core.files import read_json, read_tensors
from polyformer.core.foreign_checkpoints import ADAPTER
from polyformer.models.architectures.model_types import build_model, read_config
from polyformer.models.architectures.pretrained import (
    CONFIG,
    WEIGHTS,
    read_generation,
    read_labels,
    read_record,
)

ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
A, B = ".lora_A.weight", ".lora_B.weight"

UNREAD = ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "fan_in_fan_out")
"""Settings of peft that change the equation or add weights; a run's adapter has none of them."""


@dataclasses.dataclass(frozen=True)
class AdapterFiles:
    """An adapter: the model that it changes, alpha / r, and (A, B) by module."""

    base: str
    scale: float
    factors: dict[str, tuple[Tensor, Tensor]]


def is_adapted(folder: Path) -> bool:
    """Return whether a folder has a model as an adapter instead of whole weights."""
    return (folder / ADAPTER).is_file() and (folder / CONFIG).is_file() and not (folder / WEIGHTS).exists()


def read_adapter(folder: Path) -> AdapterFiles:
    """Return the adapter in a folder; raise `InputError` for another kind of adapter, or damaged files."""
    path = folder / ADAPTER
    settings = read_json(path, dict)
    kind, rank, alpha = (settings.get(name) for name in ("peft_type", "r", "lora_alpha"))
    base = settings.get("base_model_name_or_path")
    if kind != "LORA" or any(settings.get(name) for name in UNREAD):
        others = [name for name in UNREAD if settings.get(name)]
        raise InputError(
            f"{path}: expected plain LoRA, got {quote(kind)} {' '.join(others)}; merge it by peft"
        )
    if not (isinstance(rank, int) and rank > 0 and isinstance(alpha, int | float) and isinstance(base, str)):
        raise InputError(
            f"{path}: expected numbers r and lora_alpha, and base_model_name_or_path; restore it"
        )
    tensors = read_tensors(folder / ADAPTER_WEIGHTS)
    names = [name.removesuffix(A) for name in tensors if name.endswith(A)]
    if {*tensors} != {name + end for name in names for end in (A, B)}:
        raise InputError(f"{folder / ADAPTER_WEIGHTS}: expected a matrix A and B of each module; restore it")
    factors = {name.removeprefix(PREFIX): (tensors[name + A], tensors[name + B]) for name in names}
    return AdapterFiles(base, alpha / rank, factors)


@torch.no_grad()
def merge(model: nn.Module, adapter: AdapterFiles) -> None:
    """Add an adapter to the weights of a model, in place; raise `InputError` if it does not fit."""
    modules = dict(model.named_modules())
    for name, (a, b) in adapter.factors.items():
        weight = getattr(modules.get(name), "weight", None)
        if weight is None or weight.shape != (b.shape[0], a.shape[1]):
            change, shape = (b.shape[0], a.shape[1]), None if weight is None else tuple(weight.shape)
            raise InputError(
                f"adapter: {name} has a change of shape {change}, the model a weight of {shape}; "
                "use the model that it was trained with"
            )
        weight += (adapter.scale * (b.double() @ a.double())).to(weight.dtype)


Fill = Callable[[str, Any], object]
"""`load.start_from`: fills a model with the weights of a checkpoint."""


def base_of(folder: Path, fill: Fill) -> Any:
    """Return the model that the adapter in a folder changes, with the folder's configuration."""
    model: Any = build_model(read_config(folder))
    adapter = read_adapter(folder)
    try:
        fill(adapter.base, model)
    except InputError as error:
        raise InputError(
            f"{folder}: the model of its adapter, {adapter.base}, cannot be read ({error}); put it back, or "
            f"name its place in {folder / ADAPTER}"
        ) from error
    return model.eval()


def load_adapted(folder: Path, fill: Fill) -> Any:
    """Return the model in a folder with its adapter merged, in evaluation mode."""
    model = base_of(folder, fill)
    merge(model, read_adapter(folder))
    model.generation, model.folder = read_generation(folder), folder
    model.record = read_record(folder, model.state_dict())
    model.labels = read_labels(folder, read_json(folder / CONFIG, dict))
    return model
