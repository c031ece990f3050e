"""A larger or smaller vocabulary: all parts of a model with a row for each token."""

import dataclasses

import torch
from torch import Tensor, nn

from polyformer.core.errors import InputError
from polyformer.models.architectures import Transformer
from polyformer.nn.heads.adaptive import AdaptiveSoftmax
from polyformer.nn.heads.vocabulary import VocabularyHead
from polyformer.nn.stack import AdaptiveEmbedding


def check_resizable(model: nn.Module) -> None:
    """Raise `InputError` for vocabularies in clusters, in which another size would change the clusters."""
    if any(isinstance(module, AdaptiveEmbedding | AdaptiveSoftmax) for module in model.modules()):
        raise InputError(
            "resize_token_embeddings: adaptive embeddings and softmax have clusters of fixed sizes; create "
            "a new model with the new vocabulary"
        )


def resize(model: nn.Module, size: int) -> None:
    """Fit `model`, whose token table already has `size` rows, to this size.

    New rows of matrices are the mean of the old rows, new biases are 0.
    """
    if not isinstance(model, Transformer):
        raise InputError(f"resize_token_embeddings: {type(model).__name__} has no tokens")
    for module in model.head.modules():
        if isinstance(module, VocabularyHead):
            _resize_head(module, size)
    if isinstance(model.decoder_tokens, nn.Embedding):
        model.decoder_tokens = _resized_table(model.decoder_tokens, size)
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


def _resized_table(table: nn.Embedding, size: int) -> nn.Embedding:
    return nn.Embedding.from_pretrained(
        _rows(table.weight, size, fill=None), freeze=not table.weight.requires_grad
    )


def _rows(old: Tensor, size: int, fill: float | None) -> Tensor:
    """Return the first `size` rows of `old`; missing rows are `fill`, or the mean of the old rows."""
    with torch.no_grad():
        more = max(size - len(old), 0)
        shape = (more, *old.shape[1:])
        new = old.mean(0).expand(shape) if fill is None else old.new_full(shape, fill)
        return torch.cat([old[:size], new]).clone()
