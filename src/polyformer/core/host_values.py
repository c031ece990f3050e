"""Values of tensors on a device that the host knows, because they were copied from there; and labels.

Reading a value on a GPU waits for all earlier work of the GPU. A batch comes from the CPU, so the copy there
answers the same questions at once: whether ids are in range, whether a mask hides any token, which tokens are
labelled.

Labels are the targets of predictions, and -100 for no target; they are checked where their values are known.
"""

import contextvars
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from polyformer.core.errors import InputError

NAME = "_polyformer_host_values"


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the CPU on a device; the values on the CPU stay as its `host_values`.

    A GPU copies it through pinned memory, without a wait.
    """
    pins = device.type == "cuda"
    values = tensor.pin_memory() if pins else tensor
    return remember(values.to(device, non_blocking=pins), values)


def batch_to_device(batch: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return a batch with every tensor on a device, as `to_device` returns it.

    A GPU copies it in a separate stream, at the same time as it computes: the interpreter starts the copy
    while the GPU still runs earlier steps.
    """
    if device.type != "cuda":
        return {name: to_device(tensor, device) for name, tensor in batch.items()}
    copies, computations = _copy_stream(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(copies):
        moved = {name: to_device(tensor, device) for name, tensor in batch.items()}
    computations.wait_stream(copies)
    for tensor in moved.values():
        tensor.record_stream(computations)  # else a later copy could take its memory too early
    return moved


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def tensor_on(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor of Python numbers on a device; a copy by `torch.tensor` would wait for earlier work."""
    return torch.tensor(values, dtype=dtype, device="cpu").to(device, non_blocking=True)


def remember(tensor: Tensor, values: Tensor | None) -> Tensor:
    """Return `tensor` with these `host_values`, unless they are None or the tensor is on the CPU itself."""
    if values is not None and tensor.device.type != "cpu":
        # An operation in place changes the version, and the values are no longer known.
        setattr(tensor, NAME, (values, _version(tensor)))
    return tensor


def _version(tensor: Tensor) -> int:
    """Return the number of changes in place, which inference mode does not count."""
    return 0 if tensor.is_inference() else tensor._version


recorded: contextvars.ContextVar[bool] = contextvars.ContextVar("recorded", default=False)
"""Whether a graph is recorded (`core.recorded_graph`)."""


def is_recorded() -> bool:
    """Return whether the current operations become a graph, for any inputs of the same shapes."""
    return not torch.compiler.is_compiling() and recorded.get()


def host_values(tensor: Tensor) -> Tensor | None:
    """Return the values of a tensor in the memory of the host; None if reading them would wait for a device.

    Also None in traced code, as a value would break the graph. A result is never changed in place.
    """
    if torch.compiler.is_compiling() or is_recorded():
        return None
    if tensor.device.type == "cpu":
        return tensor
    values, version = getattr(tensor, NAME, (None, 0))
    return values if values is not None and _version(tensor) == version else None


def on_host(tensor: Tensor) -> Tensor:
    """Return the tensor in the memory of the host, never changed in place: `host_values`, else a copy."""
    values = host_values(tensor)
    return tensor.cpu() if values is None else values


def bounds(tensor: Tensor) -> tuple[float, float] | None:
    """Return the least and the greatest value, if the host knows the values and there are any."""
    values = host_values(tensor)
    if values is None or not values.numel():
        return None
    number = float if values.is_floating_point() else int
    least, greatest = values.aminmax()
    return number(least), number(greatest)


def drop_full_mask(
    module: nn.Module, arguments: tuple[Any, ...], inputs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Leave out an `attention_mask` on a device that hides no token: a hook before a model's forward pass."""
    mask = inputs.get("attention_mask")
    values = None if mask is None or mask.device.type == "cpu" else host_values(mask)
    if values is not None and bool(values.all()):
        inputs = {name: x for name, x in inputs.items() if name != "attention_mask"}
    return arguments, inputs


IGNORED = -100
"""Label of a token without a target."""


def check_labels(labels: Tensor, shape: torch.Size, classes: int) -> None:
    """Raise `InputError` unless labels have `shape` and are integers in range, see `check_range`."""
    if labels.shape != shape:
        raise InputError(f"labels: expected the shape {tuple(shape)}, got {tuple(labels.shape)}")
    if labels.dtype not in (torch.int64, torch.int32):
        raise InputError(f"labels: expected integers, got {labels.dtype}")
    check_range(labels, classes)


def check_range(labels: Tensor, classes: int) -> None:
    """Raise `InputError` unless labels are class numbers or -100; only values in `host_values` are read."""
    values = host_values(labels)
    known = None if values is None else bounds(values.masked_fill(values == IGNORED, 0))
    if known is None:
        return
    low, high = known
    if low < 0 or high >= classes:
        raise InputError(f"labels: expected numbers from 0 to {classes - 1}, or -100, got {low} to {high}")


def next_labels(labels: Tensor, document_ids: Tensor | None, valid: Tensor | None = None) -> Tensor:
    """Return labels [B, T] shifted to the left by 1: the target of each token; -100 at the end of a document.

    Padding, False in `valid` [B, T], has no target and is no target. `host_values` of the arguments give
    `host_values` of the result.
    """
    following = _next_labels(labels, document_ids, valid)
    if following.device.type == "cpu":
        return following
    numbers = host_values(labels)
    documents, real = (None if x is None else host_values(x) for x in (document_ids, valid))
    if numbers is None or (documents is None, real is None) != (document_ids is None, valid is None):
        return following
    return remember(following, _next_labels(numbers, documents, real))


def _next_labels(labels: Tensor, document_ids: Tensor | None, valid: Tensor | None) -> Tensor:
    if valid is not None:
        labels = labels.masked_fill(~valid, IGNORED)
    moved = torch.full_like(labels, IGNORED)
    moved[:, :-1] = labels[:, 1:]
    if document_ids is not None:
        moved[:, :-1] = moved[:, :-1].masked_fill(document_ids[:, 1:] != document_ids[:, :-1], IGNORED)
    return moved if valid is None else moved.masked_fill(~valid, IGNORED)
