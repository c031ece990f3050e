"""The number formats of a model's weights, and weights from files:

    float32, bfloat16    all weights in floating point
    int8                 linear layers, token tables and output matrices (`polyformer.core.ops.int8`)
    int4                 linear layers in 4 bits (`models.architectures.int4`), the others of int8 in int8
    stored               linear layers in the 4 bits of a GGUF file, the others of int8 in floating point

Norms, biases, positions, the routers of experts and learned parameters of attention mechanisms keep their
type. A model with quantized weights (the last three) cannot be trained.

A model must match the tensors of a file exactly. Unused tensors of a public checkpoint are stored next to the
model, so that none is lost: some classes of transformers have parameters that they never compute with (a
pooler below a head that pools nothing). Models here do not have them; the tensors are stored unchanged, by
name, and exports to transformers contain them again. Parts that are added to a pretrained model, a memory or
a depth policy, may be trained while the rest stays frozen.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from polyformer.core.errors import InputError, caution, quote, unknown
from polyformer.core.files import read_tensors, write_tensors
from polyformer.core.ops.int8 import Int8Embedding, Int8Linear, Int8Weight
from polyformer.core.ops.linear import Linear, WideLinear
from polyformer.core.ops.quantized import QuantizedLinear, QuantizedWeight, weight_of
from polyformer.core.parts import forget_bound_parts
from polyformer.models.architectures.int4 import Int4Linear
from polyformer.models.config import ModelConfig
from polyformer.nn.heads.adaptive import AdaptiveSoftmax
from polyformer.nn.heads.vocabulary import VocabularyHead
from polyformer.nn.stack import AdaptiveEmbedding, Stack

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
    forget_bound_parts(model)
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


ALIGNMENT = 64
"""torch allocates tensors at a multiple of this number of bytes."""


def load_weights(model: nn.Module, tensors: dict[str, Tensor], file: str | Path) -> None:
    """Load `tensors`, read from `file`, into `model`.

    Raises `InputError` unless names, shapes and types match the model and every number is finite. Tensors
    shared by several layers occur once in a file, and are shared again. Every tensor is then aligned in
    memory as torch allocates it: a product of the same numbers at another alignment may be rounded
    differently, and so a loaded model computes bit for bit the same as the saved model.

    `tensors` is empty afterwards: a part of a file is released when it has been copied, so that the weights
    are not in memory twice.
    """
    tensors = {name: aligned(tensors.pop(name)) for name in list(tensors)}
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


def freeze_pretrained_parameters(model: nn.Module, decoder: Stack | None) -> None:
    """Freeze all parameters except in the memory or depth of `decoder`, if it trains separately."""
    if decoder is None:
        return
    trained = [] if decoder.memory is None else decoder.memory.trained_modules(decoder.sequence) or []
    if decoder.depth is not None and decoder.depth.trains_only_depth:
        trained.append(decoder.depth)
    if trained:
        model.requires_grad_(False)
    # Also parts that were frozen with the rest.
    for part in trained:
        part.requires_grad_()
