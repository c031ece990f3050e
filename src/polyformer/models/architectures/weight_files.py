"""Weights that are read from files: checks, and tensors that a model does not use.

A model must match the tensors of a file exactly. Unused tensors of a public checkpoint are stored next to the
model, so that none is lost: some classes of transformers have parameters that they never compute with (a
pooler below a head that pools nothing). Models here do not have them; the tensors are stored unchanged, by
name, and exports to transformers contain them again.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from polyformer.core.errors import InputError, quote, unknown
from polyformer.core.files import read_tensors, write_tensors

ALIGNMENT = 64
"""torch allocates tensors at a multiple of this number of bytes."""


def load_weights(model: nn.Module, tensors: dict[str, Tensor], file: str | Path) -> None:
    """Load `tensors`, read from `file`, into `model`.

    Raises `InputError` unless names, shapes and types match the model and every number is finite. Tensors
    shared by several layers occur once in a file, and are shared again. Every tensor is then aligned in
    memory as torch allocates it: a product of the same numbers at another alignment may be rounded
    differently, and so a loaded model computes bit for bit the same as the saved model.
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
        setattr(model.get_submodule(module), key, _tensor_at(model, first))
    trained = {name: tensor.requires_grad for name, tensor in own.items()}
    # An assigned tensor replaces the parameter together with its flag.
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained[name])


def aligned(tensor: Tensor) -> Tensor:
    """Return `tensor`, copied if it is a view into a file, where tensors are packed without alignment."""
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


def check_layers(config: object, tensors: int, file: str | Path) -> None:
    """Raise `InputError` if a configuration has more layers than the file has tensors.

    Called before a model is built: a config.json of a few bytes may claim thousands of layers.
    """
    parts = getattr(config, "towers", (config,))
    stacks = [getattr(part, side, None) for part in parts for side in ("encoder", "decoder")]
    layers = sum(stack.shared_layers[-1] + 1 for stack in stacks if stack is not None)
    if layers > tensors:
        raise InputError(f"{file}: {tensors} tensors, too few for the {layers} layers of config.json")


def _check_numbers(name: str, tensor: Tensor, own: Tensor, file: str | Path) -> None:
    if tensor.is_floating_point() != own.is_floating_point():
        expected = "a floating type" if own.is_floating_point() else "integers"
        raise InputError(f"{file}: {quote(name)} is of {tensor.dtype}, expected {expected}")
    if tensor.is_floating_point() and not _is_finite(tensor):
        raise InputError(
            f"{file}: {quote(name)} contains NaN or infinity; the training diverged or the file is damaged: "
            "take an earlier checkpoint"
        )


def _is_finite(tensor: Tensor) -> bool:
    tensor = tensor.float() if tensor.element_size() == 1 else tensor  # 8-bit types have no sum
    # The sum needs no memory; it may overflow, and only then all numbers are checked.
    return bool(tensor.sum(dtype=torch.float32).isfinite()) or bool(tensor.isfinite().all())


def _tensor_at(model: nn.Module, name: str) -> object:
    module, _, key = name.rpartition(".")
    return getattr(model.get_submodule(module), key)


FILE = "unread.safetensors"


def read_unused_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the unused tensors in a model's directory in this library's format."""
    return read_tensors(folder / FILE) if (folder / FILE).is_file() else {}


def write_unused_tensors(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write the tensors to `folder`; without tensors remove the file of an earlier model."""
    if tensors:
        write_tensors(folder / FILE, tensors)
    else:
        (folder / FILE).unlink(missing_ok=True)
