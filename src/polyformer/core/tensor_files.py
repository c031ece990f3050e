"""safetensors files written one tensor after another, so that only one tensor needs to be in memory.

    8 bytes, the length of the header | JSON: type, shape and place of every tensor | their numbers

The whole header is known before any number. The bytes are the same as from the library's `save_file`, which
takes all tensors at once. https://huggingface.co/docs/safetensors, "Format".
"""

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from polyformer.core.errors import InputError, quote

TYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}
"""Names of types in the header, in the order from the end of a file to its beginning."""

ALIGNMENT = 8
"""The data begins at a multiple of this number of bytes: the header is padded with spaces."""


def in_file_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of `tensors` in the order of their data in a file: larger types first.

    Raises `InputError` for a type that the format does not support.
    """
    order = list(TYPES)
    for name, tensor in tensors.items():
        if tensor.dtype not in TYPES:
            raise InputError(
                f"{quote(name)} is of {tensor.dtype}, for which safetensors has no name; convert it first"
            )
    return sorted(tensors, key=lambda name: (-order.index(tensors[name].dtype), name.encode()))


def write_one_by_one(path: Path, like: Mapping[str, Tensor], tensors: Iterable[Tensor]) -> None:
    """Write `tensors`, which are consumed one by one, to `path`, in the order `in_file_order(like)`.

    like: for every name a tensor of its type and shape, which may have no data (torch's "meta").
    Raises `OSError` if the disk is full.
    """
    names = in_file_order(like)
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}  # more entries would have a random order
    end = 0
    for name in names:
        tensor = like[name]
        start, end = end, end + tensor.numel() * tensor.element_size()
        kind = TYPES[tensor.dtype]
        entries[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [start, end]}
    header = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    header += b" " * (-len(header) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for name, tensor in zip(names, tensors, strict=True):
            assert (tensor.shape, tensor.dtype) == (like[name].shape, like[name].dtype)
            if tensor.numel():
                file.write(_bytes(tensor))


def _bytes(tensor: Tensor) -> memoryview:
    """Return the memory of `tensor`, copied only from another device or from a view with gaps."""
    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy().data
