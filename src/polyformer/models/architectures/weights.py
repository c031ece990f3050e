"""The number formats of a model's weights: float32, bfloat16, or int8 (`polyformer.core.ops.int8`).

int8 applies to linear layers, token tables and output matrices, which are nearly all weights. Norms, biases,
positions, the routers of experts and learned parameters of attention mechanisms keep their type. A model with
int8 weights cannot be trained.
"""

import dataclasses
import warnings
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from polyformer.core.errors import InputError, unknown
from polyformer.core.ops.int8_layers import Int8Embedding, Int8Linear, Int8Weight, weight_of
from polyformer.core.ops.linear import Linear
from polyformer.core.weights import load_weights
from polyformer.models.config import ModelConfig
from polyformer.nn.heads.adaptive import AdaptiveSoftmax
from polyformer.nn.heads.vocabulary import VocabularyHead
from polyformer.nn.stack import AdaptiveEmbedding

WEIGHTS = "float32", "bfloat16", "int8"

# The tables of a model that have a row for each token.
TABLES = "tokens", "decoder_tokens"

M = TypeVar("M", bound=Any)


def with_weights(model: M, weights: str) -> M:
    """Return the model, or from int8 a new model, in evaluation mode with weights of this kind.

    Raises `InputError` for an unknown kind, and for weights that are not finite.
    """
    if weights not in WEIGHTS:
        raise unknown("weights", weights, WEIGHTS)
    if weights == "int8":
        if not isinstance(model.config, ModelConfig):
            raise InputError(
                f"weights: a {type(model).__name__} does not support int8; use float32 or bfloat16"
            )
        if model.config.weights != "int8":
            model.config = dataclasses.replace(model.config, weights="int8")
            round_weights(model)
        return model.eval()
    if getattr(model.config, "weights", None) == "int8":
        model = _in_floating_point(model)
    if weights == "bfloat16" and not computes_bfloat16():
        warnings.warn(
            "this CPU has no bfloat16 instructions, so bfloat16 weights are slow; int8 is faster",
            stacklevel=2,
        )
    return model.to(getattr(torch, weights)).eval()


def computes_bfloat16() -> bool:
    """Return whether torch may use instructions for bfloat16 here; a GPU is assumed to have them."""
    if torch.cuda.is_available():
        return True
    # Without AVX-512 torch converts every product to float32 and back.
    wide = "AVX512" in torch.backends.cpu.get_cpu_capability()
    return wide and torch.cpu._is_avx512_bf16_supported()


def round_weights(model: nn.Module) -> None:
    """Replace a model's weights by int8 weights; its parameters are then no longer trained."""
    new: dict[int, Int8Weight] = {}  # a shared layer stays shared
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            # Not its subclasses: routers (`ExactLinear`) keep their type.
            if type(child) is Linear:
                setattr(parent, name, new.setdefault(id(child), Int8Linear(child.weight, child.bias)))
        if isinstance(parent, VocabularyHead) and isinstance(parent.weight, Tensor):
            matrix = Int8Weight(parent.weight)
            del parent.weight  # a module cannot be assigned to the name of a parameter
            parent.weight = matrix
        if isinstance(parent, AdaptiveEmbedding | AdaptiveSoftmax):
            for i, table in enumerate(parent.tables):
                parent.tables[i] = new.setdefault(id(table), Int8Embedding(weight_of(table)))
    for name in TABLES:
        table = getattr(model, name, None)
        if isinstance(table, nn.Embedding):
            setattr(model, name, new.setdefault(id(table), Int8Embedding(table.weight)))
    model.requires_grad_(False)


def check_trainable(model: nn.Module) -> None:
    """Raise `InputError` for a model with weights in int8."""
    if any(isinstance(module, Int8Weight) for module in model.modules()):
        raise InputError(
            "weights: int8 weights cannot be trained; train in floating point and convert the result, or "
            'load these in floating point: from_pretrained(..., weights="float32")'
        )


def _in_floating_point(model: M) -> M:
    """Return a new model with the same numbers, which can be trained again."""
    tensors = dict(model.state_dict())
    for name, module in model.named_modules():
        if isinstance(module, Int8Weight):
            del tensors[f"{name}.scale"]
            matrix = isinstance(module, Int8Linear | Int8Embedding)
            integers = f"{name}.weight"
            del tensors[integers]
            tensors[integers if matrix else name] = module.dequantized()
    # The tensors are assigned by `load_weights`, so no new weights are allocated.
    with torch.device("meta"):
        new = type(model)(dataclasses.replace(model.config, weights=None))
    load_weights(new, tensors, "the int8 model")
    new.generation, new.unused_tensors = model.generation, model.unused_tensors
    return new
