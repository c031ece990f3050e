"""The state of an optimizer by the names of the parameters instead of their indices."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from polyformer.core.errors import InputError, quote


def optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the optimizer state by parameter: tensors as "NAME/KEY", and other values in the same form."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tensors: dict[str, torch.Tensor] = {}
    scalars: dict[str, Any] = {}
    for parameter, memory in optimizer.state.items():
        for key, value in memory.items():
            place = tensors if isinstance(value, torch.Tensor) else scalars
            place[f"{names[id(parameter)]}/{key}"] = value
    return tensors, scalars


def set_optimizer_state(
    file: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: dict[str, torch.Tensor],
    saved: dict[str, Any],
) -> None:
    """Load the result of `optimizer_state`, read from `file`; the optimizer's settings do not change."""
    kind = type(optimizer).__name__
    if saved["kind"] != kind:
        raise InputError(f"{file} belongs to {saved['kind']}, the run is set to {kind}; use the same one")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    memory: dict[str, dict[str, Any]] = {}
    for place, value in {**tensors, **saved["scalars"]}.items():
        name, key = place.rsplit("/", 1)
        # A copy, because the tensors read are memory-mapped.
        memory.setdefault(name, {})[key] = value.clone() if isinstance(value, torch.Tensor) else value
    strange = sorted(set(memory) - set(order))
    if strange:
        raise InputError(f"{file} is of another model: it has {quote(strange[0])}, which is not trained here")
    optimizer.load_state_dict(
        {
            "state": {i: memory[name] for i, name in enumerate(order) if name in memory},
            "param_groups": optimizer.state_dict()["param_groups"],
        }
    )
