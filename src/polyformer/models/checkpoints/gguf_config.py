"""The conversion of a GGUF file's metadata to the configuration that its family has on the hub.

GGUF names the values of an architecture "llama.block_count" and so on. A value that no table here contains is
refused by its name, since it may affect the outputs. Files of Mistral have the architecture `llama`; a file
with a window is read as a Mistral.
"""

import math
from typing import Any

import numpy as np

from polyformer.core.errors import InputError, quote
from polyformer.core.foreign_checkpoints import Gguf
from polyformer.core.ranges import LAYERS
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
