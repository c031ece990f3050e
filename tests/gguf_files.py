"""Small GGUF files, written by llama.cpp's own package as its converter writes them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from polyformer.models.checkpoints.gguf import LAYER, OUTER

Kind = gguf.GGMLQuantizationType
K_BLOCKS = {Kind.Q4_K: slice(0, 4), Kind.Q6_K: slice(208, 210)}
"""Kinds that the package reads and does not write, and where a block's scales lie."""


def pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """The rows of queries or keys in llama.cpp's order (`LlamaModel.permute` of its converter)."""
    split = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return split.swapaxes(1, 2).reshape(weight.shape)


def stored_name(name: str) -> str:
    """GGUF's name of a tensor of a Llama on the hub."""
    stem, _, ending = name.rpartition(".")
    for ours, theirs in OUTER.items():
        if stem == theirs:
            return f"{ours}.{ending}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{next(ours for ours, theirs in LAYER.items() if theirs == part)}.{ending}"


def quantized(weight: np.ndarray, kind: Kind) -> np.ndarray:
    """`weight` in `kind`; of kinds that the package does not write, bytes of the same size."""
    if kind not in K_BLOCKS:
        return gguf.quants.quantize(weight, kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(0).integers(0, 256, (weight.size // block, size)).astype(np.uint8)
    scales = np.full((len(blocks), len(blocks[0, K_BLOCKS[kind]]) // 2), 1e-3, np.float16)
    blocks[:, K_BLOCKS[kind]] = scales.view(np.uint8)
    return blocks.reshape(len(weight), -1)


def described(config: Any) -> dict[str, Any]:
    """The values of a configuration of transformers, by GGUF's names without the architecture."""
    return {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "vocab_size": config.vocab_size,
    }


def write(
    path: Path,
    architecture: str,
    values: Mapping[str, Any],
    tensors: Mapping[str, tuple[np.ndarray, Kind]],
    tokenizer: Mapping[str, Any] = {},
) -> Path:
    """A file of these values (of the architecture), tensors and values of its tokenizer."""
    writer = gguf.GGUFWriter(path, architecture)
    named = {f"{architecture}.{name}": value for name, value in values.items()}
    named |= {f"tokenizer.ggml.{name}": value for name, value in tokenizer.items()}
    for name, value in named.items():
        if isinstance(value, list):
            writer.add_array(name, value)
        else:
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
            add.get(type(value), writer.add_string)(name, value)
    for name, (tensor, kind) in tensors.items():
        writer.add_tensor(name, quantized(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors_of(
    model: Any, kind: Kind = Kind.F32, permuted: bool = True
) -> dict[str, tuple[np.ndarray, Kind]]:
    """A model's tensors of transformers by GGUF's names: matrices of `kind`, vectors of float32."""
    config = model.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        weight = tensor.float().numpy()
        part = name.split(".")[-2]
        if permuted and part in heads:
            weight = pairs(weight, heads[part])
        tensors[stored_name(name)] = (weight, kind if weight.ndim == 2 else Kind.F32)
    return tensors
