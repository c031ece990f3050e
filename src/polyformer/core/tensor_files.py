"""safetensors files written one tensor after another: no two of them need be in memory at a time.

    8 bytes, the length of the header | JSON: type, shape and place of every tensor | their numbers

All that the header says is known before any number is there. The bytes are those of the library's own
`save_file`, which takes all tensors at once. https://huggingface.co/docs/safetensors, "Format".
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
"""Bytes that the numbers begin at a multiple of: the header ends with spaces."""


def in_file_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of `tensors` in the order in which their numbers stand in a file: larger types first.

    Raises `InputError` for a type that the format has no name for.
    """
    order = list(TYPES)
    for name, tensor in tensors.items():
        if tensor.dtype not in TYPES:
            raise InputError(
                f"{quote(name)} is of {tensor.dtype}, for which safetensors has no name; convert it first"
            )
    return sorted(tensors, key=lambda name: (-order.index(tensors[name].dtype), name.encode()))


def write_one_by_one(path: Path, like: Mapping[str, Tensor], tensors: Iterable[Tensor]) -> None:
    """Write into `path` the `tensors`, which are taken one at a time, in the order `in_file_order(like)`.

    like: for every name a tensor of its type and shape, which may have no numbers (torch's "meta").
    Raises `OSError` where the disk is full.
    """
    names = in_file_order(like)
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}  # more would be written in random order
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
    """The memory of `tensor`, copied only from another device or out of a view with gaps."""
    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy().data
