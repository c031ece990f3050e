"""GGUF files: the configuration that their family has on the hub, and their tensors under the hub's names.

GGUF names the values of an architecture "llama.block_count" and so on. A value that no table here contains is
refused by its name, since it may affect the outputs. Files of Mistral have the architecture `llama`; a file
with a window is read as a Mistral.

Tensors are dequantized in groups of rows. Memory: the requested tensor in its final type, and `BYTES_AT_ONCE`
of it in float32 during dequantization. The numbers are computed by the package `gguf` of the llama.cpp
project.
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
from polyformer.core.ranges import LAYERS
from polyformer.models.architectures.int4 import BLOCK, GROUP
from polyformer.models.checkpoints.config_mapping import Tree

# The supported architectures, and their classes.
ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}

SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
# Values without effect, if they are in these lists.
INERT: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "pooling_type": (0, 1, 2, 3, 4),  # pooling of embeddings, which no language model computes
    "rope.scaling.finetuned": (True, False),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),  # -1: the default of the type
    "tensor_data_layout": ("Meta AI original pth", "reference"),
}

READ = (
    *(*SIZES, "attention.head_count_kv", "attention.key_length", "attention.layer_norm_rms_epsilon"),
    *("attention.sliding_window", "attention.value_length", "rope.dimension_count", "rope.freq_base"),
    *("rope.scale_linear", "rope.scaling.attn_factor", "rope.scaling.factor", "rope.scaling.type"),
    *("rope.scaling.original_context_length", "rope.scaling.yarn_attn_factor"),
    *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "vocab_size"),
)
# The tensor by which files of Llama 3.1 and later divide the frequencies of rotary positions.
ROPE_FACTORS = "rope_freqs.weight"

# The published parameters of every Llama 3.1, 3.2 and 3.3: files contain only the resulting factors.
LLAMA3: Tree = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

TABLE = "token_embd.weight"


def hub_config(file: Gguf, factors: np.ndarray | None = None) -> Tree:
    """Return the configuration; `factors` are the values of `ROPE_FACTORS`, if the file has them.

    Raises `InputError` for an architecture or a value that is not supported.
    """
    name = file.architecture
    if name not in ARCHITECTURES:
        raise InputError(
            f"{file.path}: general.architecture is {quote(name)}, and only {', '.join(ARCHITECTURES)} are "
            "supported"
        )
    own = {
        key.removeprefix(f"{name}."): value
        for key, value in file.metadata.items()
        if key.startswith(f"{name}.")
    }
    _refuse_unknown(file, own)
    if TABLE not in file.tensors or len(file.tensors[TABLE].shape) != 2:
        raise InputError(f"{file.path}: no table of tokens ({TABLE}) in it; download the file again")
    hub: Tree = {theirs: file.value(f"{name}.{key}", int) for key, theirs in SIZES.items()}
    layers, heads = hub["num_hidden_layers"], hub["num_attention_heads"]
    if not 1 <= layers <= LAYERS:
        raise InputError(
            f"{file.path}: {name}.block_count is {layers}, expected 1 to {LAYERS} layers; "
            "download the file again"
        )
    hub |= {
        "model_type": name,
        "architectures": [ARCHITECTURES[name]],
        "vocab_size": file.tensors[TABLE].shape[0],
        "num_key_value_heads": file.value(f"{name}.attention.head_count_kv", int, heads),
        "rms_norm_eps": file.value(f"{name}.attention.layer_norm_rms_epsilon", float, 1e-6),
        "head_dim": _head_size(file, own, hub),
        "rope_parameters": {
            "rope_theta": file.value(f"{name}.rope.freq_base", float, 10000.0),
            **_scaling(file, own, hub),
        },
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **_special(file),
    }
    if name == "llama":
        hub |= {
            "attention_bias": "blk.0.attn_q.bias" in file.tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        }
    # A llama with a window is a Mistral: llama.cpp has one architecture for both.
    if name != "qwen2":
        window = own.get("attention.sliding_window") or None
        if window is not None:
            hub |= {"model_type": "mistral", "architectures": [ARCHITECTURES["mistral"]]}
        if hub["model_type"] == "mistral":
            hub["sliding_window"] = window
    if factors is not None:
        hub["rope_parameters"] |= _llama3(file, factors, hub)
    return hub


def _refuse_unknown(file: Gguf, own: Tree) -> None:
    splits = file.metadata.get("split.count", 1)
    if splits != 1:
        raise InputError(
            f"{file.path}: one of {quote(splits)} parts of a model; join them with llama.cpp's "
            "llama-gguf-split --merge, and load the result"
        )
    for key, value in own.items():
        if key in READ or (isinstance(value, bool | int | float | str) and value in INERT.get(key, ())):
            continue
        if key in INERT:
            known = " or ".join(map(repr, INERT[key]))
            raise InputError(
                f"{file.path}: {file.architecture}.{key} is {quote(value)}, and only {known} is supported"
            )
        raise InputError(
            f"{file.path}: {file.architecture}.{key} is {quote(value)}, an option that is not supported"
        )
    # Llama.cpp does not record which layers have the window.
    if file.architecture == "qwen2" and own.get("attention.sliding_window"):
        raise InputError(
            f"{file.path}: qwen2.attention.sliding_window is {quote(own['attention.sliding_window'])}, "
            "without the layers that have it; only 0 is supported"
        )


def _head_size(file: Gguf, own: Tree, hub: Tree) -> int:
    """Return the head dimension; all channels are rotated."""
    whole, heads = hub["hidden_size"], hub["num_attention_heads"]
    size = own.get("attention.key_length", whole // heads if heads > 0 else 0)
    for key in ("attention.value_length", "rope.dimension_count"):
        if own.get(key, size) != size:
            raise InputError(
                f"{file.path}: {file.architecture}.{key} is {quote(own[key])}, and only {quote(size)} is "
                "supported, all channels of a head"
            )
    return size


def _special(file: Gguf) -> Tree:
    """Return the ids of special tokens; several end tokens if the end of a turn differs from a text's."""
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    ids = {role: file.metadata.get(f"tokenizer.ggml.{name}_token_id") for role, name in names.items()}
    hub: Tree = {f"{role}_token_id": number for role, number in ids.items()}
    # Chat models end a turn by another token than a text.
    turn = file.metadata.get("tokenizer.ggml.eot_token_id")
    if turn is not None and ids["eos"] is not None and turn != ids["eos"]:
        hub["eos_token_id"] = [ids["eos"], turn]
    return hub


def _scaling(file: Gguf, own: Tree, hub: Tree) -> Tree:
    """Return the extension of rotary positions, in the format of `rope_parameters`."""
    name = file.architecture
    linear = own.get("rope.scale_linear")
    kind = own.get("rope.scaling.type", "none" if linear is None else "linear")
    if kind == "none":
        return {"rope_type": "default"}
    factor = file.value(f"{name}.rope.scaling.factor", float, 1.0 if linear is None else linear)
    options: Tree = {"rope_type": kind, "factor": factor}
    if kind != "yarn":
        return options
    trained = file.value(f"{name}.rope.scaling.original_context_length", int, hub["max_position_embeddings"])
    options["original_max_position_embeddings"] = trained
    for key in ("beta_fast", "beta_slow"):
        if f"rope.scaling.yarn_{key}" in own:
            options[key] = file.value(f"{name}.rope.scaling.yarn_{key}", float)
    scale = own.get("rope.scaling.yarn_attn_factor", own.get("rope.scaling.attn_factor"))
    if scale is not None and scale != 1:  # a factor in llama.cpp, the whole value in transformers
        options["attention_factor"] = scale * (0.1 * math.log(factor) + 1 if factor > 1 else 1.0)
    return options


def _llama3(file: Gguf, factors: np.ndarray, hub: Tree) -> Tree:
    """Return Llama 3's extension for these factors [D / 2]; none if all are 1."""
    if (factors == 1).all():
        return {}
    channels, options = hub["head_dim"], {"factor": float(factors.max()), **LLAMA3}
    angles = hub["rope_parameters"]["rope_theta"] ** -(np.arange(0, channels, 2) / channels)
    low, high = options["low_freq_factor"], options["high_freq_factor"]
    # Llama 3's interpolation between the two frequencies, as in rope_options.
    share = (options["original_max_position_embeddings"] * angles / (2 * math.pi) - low) / (high - low)
    expected = 1 / (share.clip(0, 1) * (1 - 1 / options["factor"]) + 1 / options["factor"])
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise InputError(
            f"{file.path}: the frequencies in {ROPE_FACTORS} are not those of Llama 3.1 ({quote(LLAMA3)}), "
            "the only ones that are supported"
        )
    return {"rope_type": "llama3", **options}


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
    in_blocks: bool = False  # weights of linear layers as the blocks of `models.architectures.int4`

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
    """Return the bytes of a weight of type Q4_0 or Q4_1 as blocks of `models.architectures.int4`: [O, 20 G].

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
