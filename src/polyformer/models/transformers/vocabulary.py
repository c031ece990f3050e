"""The vocabulary of a wrapped model: the output matrix [V, E] as transformers' tools know it, and its size.

The output matrix is the head itself if the head has a matrix, and otherwise the token table of the tied head.
Both are modules of the model with their own `weight`. So a tool may find the module by identity, copy it,
shard it or exclude it from adaptation; no name of a parameter changes.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from polyformer.core.errors import InputError, quote
from polyformer.models.architectures import Transformer
from polyformer.nn.heads.adaptive import AdaptiveSoftmax
from polyformer.nn.heads.vocabulary import VocabularyHead, VocabularyOutput
from polyformer.nn.stack import AdaptiveEmbedding


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
    # Tools also set the module that they have got.
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


def check_resizable(model: nn.Module) -> None:
    """Raise `InputError` for vocabularies in clusters, in which another size would change the clusters."""
    if any(isinstance(module, AdaptiveEmbedding | AdaptiveSoftmax) for module in model.modules()):
        raise InputError(
            "resize_token_embeddings: adaptive embeddings and softmax have clusters of fixed sizes; create "
            "a new model with the new vocabulary"
        )


def resize(model: nn.Module, size: int) -> None:
    """Fit `model` to the `size` that its token table already has.

    New rows of matrices are the mean of the old rows, new biases are 0.
    """
    if not isinstance(model, Transformer):
        raise InputError(f"resize_token_embeddings: {type(model).__name__} has no tokens")
    for module in model.head.modules():
        if isinstance(module, VocabularyHead):
            _resize_head(module, size)
    if isinstance(model.decoder_tokens, nn.Embedding):
        table = model.decoder_tokens
        rows = _rows(table.weight, size, fill=None)
        model.decoder_tokens = nn.Embedding.from_pretrained(rows, freeze=not table.weight.requires_grad)
    assert isinstance(model.tokens, nn.Embedding), "int8 is not wrapped"
    model.tokens.num_embeddings = size
    model.config = dataclasses.replace(model.config, vocab_size=size)


def _resize_head(head: VocabularyHead, size: int) -> None:
    if isinstance(head.weight, nn.Parameter):
        head.weight = nn.Parameter(_rows(head.weight, size, fill=None), head.weight.requires_grad)
    bias = head.bias
    if isinstance(bias, nn.Parameter):
        head.bias = nn.Parameter(_rows(bias, size, fill=0.0), bias.requires_grad)
    elif bias is not None:
        head.bias = _rows(bias, size, fill=0.0)


def _rows(old: Tensor, size: int, fill: float | None) -> Tensor:
    """Return the first `size` rows of `old`; missing rows are `fill`, or the mean of the old rows."""
    with torch.no_grad():
        more = max(size - len(old), 0)
        shape = (more, *old.shape[1:])
        # The mean row gives new tokens an average probability.
        new = old.mean(0).expand(shape) if fill is None else old.new_full(shape, fill)
        return torch.cat([old[:size], new]).clone()
