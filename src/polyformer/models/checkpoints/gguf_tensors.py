"""The tensors of a GGUF file under the names of the hub, dequantized in groups of rows.

Memory: the requested tensor in its final type, and `BYTES_AT_ONCE` of it in float32 during dequantization.
The numbers are computed by the package `gguf` of the llama.cpp project.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyformer.core.errors import InputError, quote
from polyformer.core.foreign_checkpoints import Gguf, read_gguf
from polyformer.core.imports import needs_extra
from polyformer.models.architectures.int4 import BLOCK, GROUP
from polyformer.models.checkpoints.config_mapping import Tree
from polyformer.models.checkpoints.gguf_config import ROPE_FACTORS, hub_config

# The bytes of a tensor in float32 that are dequantized at once, at least one row.
BYTES_AT_ONCE = 2**22

OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
# GGUF's names of a Llama's tensors, with the hub's.
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

# Tensors without weights: the configuration determines their values.
LEFT = ("rope_freqs", "attn_rot_embd")


@dataclass(frozen=True)
class GgufTensors:
    """The tensors of a file, read on access."""

    file: Gguf
    names: dict[str, str]  # each tensor's name in the file
    heads: dict[str, int]  # of tensors with rows in llama.cpp's order, by the last part of the name
    dtype: torch.dtype = torch.float32
    in_blocks: bool = False  # weights of linear layers as the blocks of `core.ops.int4`

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __getitem__(self, name: str) -> Tensor:
        stored = self.names[name]
        if self.in_blocks and _is_linear(stored):
            tensor = read_blocks(self.file, stored)
        else:
            tensor = read_tensor(self.file, stored, self.dtype)
        heads = next((heads for end, heads in self.heads.items() if f".{end}." in name), None)
        return tensor if heads is None else halves(tensor, heads)


def halves(tensor: Tensor, heads: int) -> Tensor:
    """Return the rows of each head as halves [x0 x1 ... y0 y1 ...], the order of the hub's rotary positions.

    llama.cpp has them as pairs [x0 y0 x1 y1 ...]. tensor: [H D, ...].
    """
    if len(tensor) % (2 * heads):
        return tensor  # the shape differs from the configuration, which is reported for all such tensors
    return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def open_gguf(path: Path, dtype: torch.dtype | None = None) -> tuple[Tree, GgufTensors]:
    """Return the configuration of a file's model, as on the hub, and its tensors.

    Raises `InputError` for a file that is damaged, lacks a tensor or has numbers of an unknown kind.
    """
    file = read_gguf(path)
    factors = read_tensor(file, ROPE_FACTORS).flatten().numpy() if ROPE_FACTORS in file.tensors else None
    hub = hub_config(file, factors)
    _check_complete(file, hub["num_hidden_layers"])
    for name in file.tensors:
        _bytes_of_rows(file, name)
    heads = {}
    # Only llama.cpp's converter of Llama reorders rows.
    if file.architecture != "qwen2":
        heads = {"q_proj": hub["num_attention_heads"], "k_proj": hub["num_key_value_heads"]}
    return hub, GgufTensors(file, _hub_names(file), heads, dtype or torch.float32)


def _hub_names(file: Gguf) -> dict[str, str]:
    """Return each tensor's name on the hub, with its name in the file; unknown names are unchanged."""
    names = {}
    for stored in file.tensors:
        stem, _, ending = stored.rpartition(".")
        part = stem.rpartition(".")[2]
        if part in LEFT:
            continue
        name = OUTER.get(stem, stem)
        if stem.startswith("blk.") and part in LAYER:
            name = f"model.layers.{stem.split('.')[1]}.{LAYER[part]}"
        names[f"{name}.{ending}"] = stored
    return names


def _is_linear(stored: str) -> bool:
    """Return whether a name in a file is of the weight of a linear layer."""
    *_, part, ending = stored.split(".")
    return ending == "weight" and part in LAYER and not part.endswith("_norm")


def _check_complete(file: Gguf, layers: int) -> None:
    layered = (f"blk.{layer}.{part}.weight" for layer in range(layers) for part in LAYER)
    for name in ("token_embd.weight", "output_norm.weight", *layered):
        if name not in file.tensors:
            raise InputError(
                f"{file.path}: the tensor {quote(name)} of {layers} layers is missing; download it again"
            )


def _bytes_of_rows(file: Gguf, name: str) -> tuple[Any, int, int]:
    """Return the kind of a tensor's numbers in the package `gguf`, its number of rows, and the bytes per row.

    Raises `InputError` for an unknown kind, and for a tensor that exceeds the file.
    """
    place, quants = file.tensors[name], _gguf_package(file)
    kind = _kind(place.kind)
    if kind is None:
        raise InputError(
            f"{file.path}: unknown quantization type {_type_name(quants, place.kind)} in {quote(name)}; a "
            "newer package gguf may know it (pip install -U gguf), or quantize the model in another way"
        )
    block, size = quants.GGML_QUANT_SIZES[kind]
    *outer, width = place.shape or (1,)
    rows = math.prod(outer)
    if width % block:
        raise InputError(
            f"{file.path}: damaged: rows of {width} numbers in {quote(name)}, in blocks of "
            f"{block}; download the file again"
        )
    row = width // block * size
    if place.offset + rows * row > file.size:
        raise InputError(
            f"{file.path}: truncated: it has {file.size} bytes, and {quote(name)} ends at byte "
            f"{place.offset + rows * row}; download the file again"
        )
    return kind, rows, row


@lru_cache
def _kind(number: int) -> Any:
    """Return the name of a kind of numbers in the package `gguf`; None if it cannot read them."""
    import gguf

    try:
        kind = gguf.GGMLQuantizationType(number)
        # A trial: the package names some kinds that it cannot dequantize.
        dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError):
        return None
    return kind


def _type_name(quants: Any, kind: int) -> str:
    names = {int(known): known.name for known in quants.GGMLQuantizationType}
    return f"{kind} ({names[kind]})" if kind in names else str(kind)


def _gguf_package(file: Gguf) -> Any:
    with needs_extra("gguf", f"{file.path}: reading GGUF needs the package gguf"):
        import gguf
    return gguf


def dequantize(rows: np.ndarray, kind: Any) -> np.ndarray:
    """Return the float32 numbers of rows of bytes [R, B] -> [R, N]."""
    from gguf import quants

    return quants.dequantize(rows, kind)


def read_tensor(file: Gguf, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor of a file, by its name in the file."""
    kind, rows, row = _bytes_of_rows(file, name)
    place = file.tensors[name]
    tensor = torch.empty(place.shape, dtype=dtype)
    if not tensor.numel():
        return tensor
    flat = tensor.view(rows, -1)
    # Whole rows: no block of quantized numbers spans two of them.
    step = max(1, BYTES_AT_ONCE // (4 * flat.shape[1]))
    stored = np.memmap(file.path, np.uint8, "r", place.offset, (rows, row))
    for start in range(0, rows, step):
        part = dequantize(np.array(stored[start : start + step]), kind)
        flat[start : start + step] = torch.from_numpy(part)
    return tensor


def read_blocks(file: Gguf, name: str) -> Tensor:
    """Return the bytes of a weight of type Q4_0 or Q4_1 as blocks of `core.ops.int4`: [O, 20 G].

    Raises `InputError` for a weight of another type.
    """
    kind, rows, row = _bytes_of_rows(file, name)
    if kind.name not in ("Q4_0", "Q4_1"):
        raise InputError(
            f"{file.path}: weights: 'stored' keeps numbers of type Q4_0 and Q4_1, but {quote(name)} is of "
            f"type {kind.name}, and torch has no product for it; use int8, int4 or float32"
        )
    place = file.tensors[name]
    blocks = torch.from_numpy(np.fromfile(file.path, np.uint8, rows * row, offset=place.offset))
    blocks = blocks.view(rows, place.shape[-1] // GROUP, -1)
    if kind.name == "Q4_0":  # d (q - 8) = d q + m
        scale = blocks[..., :2].contiguous().view(torch.float16)
        blocks = torch.cat([blocks[..., :2], (-8 * scale).view(torch.uint8), blocks[..., 2:]], 2)
    assert blocks.shape[2] == BLOCK
    return blocks.flatten(1)
