"""The output matrix [V, E] of a wrapped model's logits, as a module that transformers' tools know.

It is the head itself if the head has a matrix, and otherwise the token table of the tied head. Both are
modules of the model with their own `weight`. So a tool may find the module by identity, copy it, shard it or
exclude it from adaptation; no name of a parameter changes.
"""

from typing import Any

import torch
from torch import nn

from polyformer.core.errors import InputError, quote
from polyformer.models.architectures import Transformer
from polyformer.nn.heads.vocabulary import VocabularyOutput


def output_matrix(model: nn.Module) -> nn.Module | None:
    """Return the module with the matrix as `weight`; None for a head of another kind or in clusters."""
    head = _vocabulary_head(model)
    if head is None:
        return None
    return _table(model)[1] if head.weight is None else head


def replace_output_matrix(model: nn.Module, value: Any) -> None:
    """Use the `weight` of `value` as the matrix, and its `bias`, if any, as the head's bias.

    A tied head stays tied: its table is replaced for all modules that use it.
    """
    head: Any = _vocabulary_head(model)
    if head is None:
        raise InputError("set_output_embeddings: the head of this model has no matrix over the vocabulary")
    if value is output_matrix(model):
        return
    weight: Any = getattr(value, "weight", None)
    bias: Any = getattr(value, "bias", None)
    _check(model, weight, bias, head.bias, isinstance(value, nn.Embedding))
    if head.weight is None:
        name, _ = _table(model)
        if not isinstance(value, nn.Embedding):
            table = nn.Embedding(*weight.shape, device="meta")
            table.weight = weight
            value = table
        setattr(model, name, value)
    else:
        head.weight = weight
    if bias is not None:
        head.bias = bias


def _check(model: nn.Module, weight: Any, bias: Any, old: Any, is_table: bool) -> None:
    """Raise `InputError` if a matrix or a bias does not fit the model."""
    matrix: Any = output_matrix(model)
    tokens: Any = model.tokens
    expected = (len(tokens.weight), matrix.weight.shape[1])
    if not isinstance(weight, nn.Parameter) or weight.shape != expected:
        shape = tuple(weight.shape) if isinstance(weight, torch.Tensor) else type(weight).__name__
        raise InputError(
            f"set_output_embeddings: expected a module with a parameter `weight` of the shape {expected}, "
            f"got {quote(shape)}; for another number of tokens use resize_token_embeddings"
        )
    if not is_table and (bias is None) == isinstance(old, nn.Parameter):
        got, has = ("none", "a") if bias is None else ("one", "no")
        raise InputError(f"set_output_embeddings: the head has {has} bias, the module {got}")


def _vocabulary_head(model: nn.Module) -> Any:
    """Return the head over the vocabulary, the token head of two; a tool may have wrapped it."""
    if not isinstance(model, Transformer):
        return None
    head: Any = model.head
    head = getattr(head, "tokens", head)
    return head if isinstance(getattr(head, "output", None), VocabularyOutput) else None


def _table(model: Any) -> tuple[str, nn.Module]:
    """Return the name and the module of the token table that a tied head reads."""
    name = "tokens" if model.decoder_tokens is None else "decoder_tokens"
    return name, getattr(model, name)
