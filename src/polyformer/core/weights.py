"""Tensors read from a file, put into a model that they fit exactly."""

from pathlib import Path

from torch import Tensor, nn

from polyformer.core.errors import InputError, unknown

ALIGNMENT = 64
"""Bytes: torch's own tensors begin at a multiple of so many."""


def load_weights(model: nn.Module, tensors: dict[str, Tensor], file: str | Path) -> None:
    """Put `tensors`, read from `file`, into `model`; `InputError` unless names and shapes are the model's.

    What several layers share stands in a file once, and is shared again. Every tensor of the model then lies
    in memory as torch would have put it: a product of the same numbers at another alignment may be rounded
    otherwise, and so a loaded model computes bit for bit what the saved one did.
    """
    tensors = {name: aligned(tensor) for name, tensor in tensors.items()}
    own = model.state_dict(keep_vars=True)
    firsts: dict[int, str] = {}
    shared = {name: first for name, one in own.items() if (first := firsts.setdefault(id(one), name)) != name}
    tensors = {**{name: tensors[first] for name, first in shared.items() if first in tensors}, **tensors}
    for name in tensors:
        if name not in own:
            raise unknown(f"tensor in {file}", name, own)
    for name, tensor in own.items():
        if name not in tensors:
            raise InputError(f"{file}: the tensor {name!r} is missing")
        if tensors[name].shape != tensor.shape:
            raise InputError(
                f"{file}: {name!r} has shape {tuple(tensors[name].shape)}, expected {tuple(tensor.shape)}"
            )
    model.load_state_dict(tensors, assign=True)
    for name, first in shared.items():
        module, _, key = name.rpartition(".")
        setattr(model.get_submodule(module), key, _at(model, first))
    for parameter in model.parameters():  # an assigned tensor takes the place of the parameter, flag included
        parameter.requires_grad_(True)


def aligned(tensor: Tensor) -> Tensor:
    """`tensor`, copied where it is a view into a file, which puts tensors one right after the other."""
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


def _at(model: nn.Module, name: str) -> object:
    module, _, key = name.rpartition(".")
    return getattr(model.get_submodule(module), key)
