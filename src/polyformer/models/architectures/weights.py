"""The number formats of a model's weights:

    float32, bfloat16    all weights in floating point
    int8                 linear layers, token tables and output matrices (`polyformer.core.ops.int8`)
    int4                 linear layers in 4 bits (`models.architectures.int4`), the others of int8 in int8
    stored               linear layers in the 4 bits of a GGUF file, the others of int8 in floating point

Norms, biases, positions, the routers of experts and learned parameters of attention mechanisms keep their
type. A model with quantized weights (the last three) cannot be trained.
"""

import dataclasses
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from polyformer.core.errors import InputError, caution, unknown
from polyformer.core.ops.int8 import Int8Embedding, Int8Linear, Int8Weight
from polyformer.core.ops.linear import Linear, WideLinear
from polyformer.core.ops.quantized import QuantizedLinear, QuantizedWeight, weight_of
from polyformer.models.architectures.int4 import Int4Linear
from polyformer.models.architectures.weight_files import load_weights
from polyformer.models.config import ModelConfig
from polyformer.nn.heads.adaptive import AdaptiveSoftmax
from polyformer.nn.heads.vocabulary import VocabularyHead
from polyformer.nn.stack import AdaptiveEmbedding

STORED = "stored"

LINEAR: dict[str, type[QuantizedLinear]] = {"int8": Int8Linear, "int4": Int4Linear, STORED: Int4Linear}
"""The linear layers of a model with quantized weights."""

WEIGHTS = "float32", "bfloat16", *LINEAR

# The tables of a model that have a row for each token.
TABLES = "tokens", "decoder_tokens"

M = TypeVar("M", bound=Any)


def with_weights(model: M, weights: str) -> M:
    """Return the model, or from quantized weights a new model, in evaluation mode with weights of this kind.

    Raises `InputError` for an unknown kind, for weights that are not finite, and for "stored" unless the
    model has such weights.
    """
    if weights not in WEIGHTS:
        raise unknown("weights", weights, WEIGHTS)
    if weights in LINEAR and not isinstance(model.config, ModelConfig):
        raise InputError(
            f"weights: a {type(model).__name__} does not support {weights}; use float32 or bfloat16"
        )
    own = getattr(model.config, "weights", None)
    if own is not None and weights == own:
        return model.eval()
    if weights == STORED:
        raise InputError(
            "weights: 'stored' keeps the 4-bit numbers of a GGUF file, and this model is from another "
            "file; use 'int4', which rounds the weights"
        )
    if own is not None:
        model = _in_floating_point(model)
    if weights in LINEAR:
        model.config = dataclasses.replace(model.config, weights=weights)
        quantize_weights(model, weights)
        return model.eval()
    if weights == "bfloat16" and not computes_bfloat16():
        caution("this CPU has no bfloat16 instructions, so bfloat16 weights are slow; int8 is faster")
    return model.to(getattr(torch, weights)).eval()


def computes_bfloat16() -> bool:
    """Return whether torch may use instructions for bfloat16 here; a GPU is assumed to have them."""
    if torch.cuda.is_available():
        return True
    # Without AVX-512 torch converts every product to float32 and back.
    wide = "AVX512" in torch.backends.cpu.get_cpu_capability()
    return wide and torch.cpu._is_avx512_bf16_supported()


def quantize_weights(model: nn.Module, weights: str) -> None:
    """Replace a model's weights by quantized weights; its parameters are then no longer trained."""
    new: dict[int, QuantizedWeight] = {}  # a shared layer stays shared
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            # Not its subclasses: routers (`ExactLinear`) keep their type.
            if isinstance(child, Linear) and type(child) in (Linear, WideLinear):
                setattr(parent, name, new.setdefault(id(child), LINEAR[weights](child.weight, child.bias)))
        if weights == STORED:
            continue
        if isinstance(parent, VocabularyHead) and isinstance(parent.weight, Tensor):
            matrix = Int8Weight(parent.weight)
            del parent.weight  # a module cannot be assigned to the name of a parameter
            parent.weight = matrix
        if isinstance(parent, AdaptiveEmbedding | AdaptiveSoftmax):
            for i, table in enumerate(parent.tables):
                parent.tables[i] = new.setdefault(id(table), Int8Embedding(weight_of(table)))
    for name in () if weights == STORED else TABLES:
        table = getattr(model, name, None)
        if isinstance(table, nn.Embedding):
            setattr(model, name, new.setdefault(id(table), Int8Embedding(table.weight)))
    model.requires_grad_(False)


def check_trainable(model: nn.Module) -> None:
    """Raise `InputError` for a model with quantized weights."""
    if any(isinstance(module, QuantizedWeight) for module in model.modules()):
        raise InputError(
            "weights: quantized weights cannot be trained; train in floating point and convert the result, "
            'or load these in floating point: from_pretrained(..., weights="float32")'
        )


def _in_floating_point(model: M) -> M:
    """Return a new model with the same numbers, which can be trained again."""
    tensors = dict(model.state_dict())
    for name, module in model.named_modules():
        if isinstance(module, QuantizedWeight):
            for buffer, _ in module.named_buffers():
                del tensors[f"{name}.{buffer}"]
            is_layer = isinstance(module, QuantizedLinear | Int8Embedding)
            tensors[f"{name}.weight" if is_layer else name] = module.dequantized()
    # The tensors are assigned by `load_weights`, so no new weights are allocated.
    with torch.device("meta"):
        new = type(model)(dataclasses.replace(model.config, weights=None))
    load_weights(new, tensors, "the quantized model")
    new.generation, new.unused_tensors, new.labels = model.generation, model.unused_tensors, model.labels
    return new
