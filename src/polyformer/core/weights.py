"""Tensors read from a file, put into a model that they fit exactly."""

from pathlib import Path

import torch
from torch import Tensor, nn

from polyformer.core.errors import InputError, quote, unknown

ALIGNMENT = 64
"""Bytes: torch's own tensors begin at a multiple of so many."""


def load_weights(model: nn.Module, tensors: dict[str, Tensor], file: str | Path) -> None:
    """Put `tensors`, read from `file`, into `model`; `InputError` unless names, shapes and types are the
    model's and every number is finite.

    What several layers share stands in a file once, and is shared again. Every tensor of the model then lies
    in memory as torch would have put it: a product of the same numbers at another alignment may be rounded
    otherwise, and so a loaded model computes bit for bit what the saved one did.
    """
    tensors = {name: aligned(tensor) for name, tensor in tensors.items()}
    own = model.state_dict(keep_vars=True)
    firsts: dict[int, str] = {}
    shared = {
        name: first for name, tensor in own.items() if (first := firsts.setdefault(id(tensor), name)) != name
    }
    tensors = {**{name: tensors[first] for name, first in shared.items() if first in tensors}, **tensors}
    for name in tensors:
        if name not in own:
            raise unknown(f"tensor in {file}", name, own)
    for name, tensor in own.items():
        if name not in tensors:
            raise InputError(f"{file}: the tensor {quote(name)} is missing")
        if tensors[name].shape != tensor.shape:
            raise InputError(
                f"{file}: {quote(name)} has shape {tuple(tensors[name].shape)}, "
                f"expected {tuple(tensor.shape)}"
            )
        _check_numbers(name, tensors[name], tensor, file)
    model.load_state_dict(tensors, assign=True)
    for name, first in shared.items():
        module, _, key = name.rpartition(".")
        setattr(model.get_submodule(module), key, _at(model, first))
    trained = {name: tensor.requires_grad for name, tensor in own.items()}
    for name, parameter in model.named_parameters():  # an assigned tensor replaces it, flag included
        parameter.requires_grad_(trained[name])


def aligned(tensor: Tensor) -> Tensor:
    """`tensor`, copied where it is a view into a file, which puts tensors one right after the other."""
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


def check_layers(config: object, tensors: int, file: str | Path) -> None:
    """Raises `InputError` where a configuration has more layers than the file has tensors.

    Asked before a model is built: a config.json of a few bytes may speak of thousands of layers.
    """
    stacks = [getattr(config, side, None) for side in ("encoder", "decoder")]
    layers = sum(stack.num_hidden_groups or stack.num_hidden_layers for stack in stacks if stack is not None)
    if layers > tensors:
        raise InputError(f"{file}: {tensors} tensors, too few for the {layers} layers of config.json")


def _check_numbers(name: str, tensor: Tensor, own: Tensor, file: str | Path) -> None:
    if tensor.is_floating_point() != own.is_floating_point():
        expected = "a floating type" if own.is_floating_point() else "integers"
        raise InputError(f"{file}: {quote(name)} is of {tensor.dtype}, expected {expected}")
    if tensor.is_floating_point() and not _is_finite(tensor):
        raise InputError(
            f"{file}: {quote(name)} holds NaN or infinity; the training diverged or the file is damaged: "
            "take an earlier checkpoint"
        )


def _is_finite(tensor: Tensor) -> bool:
    tensor = tensor.float() if tensor.element_size() == 1 else tensor  # 8-bit types know no sums
    # The sum needs no memory; it may overflow, and then every number is looked at.
    return bool(tensor.sum(dtype=torch.float32).isfinite()) or bool(tensor.isfinite().all())


def _at(model: nn.Module, name: str) -> object:
    module, _, key = name.rpartition(".")
    return getattr(model.get_submodule(module), key)
