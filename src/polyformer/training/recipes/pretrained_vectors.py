"""Pretrained word vectors as initial token embeddings, optionally frozen: `--pretrained-vectors FILE`."""

import dataclasses

import torch
from torch import nn

from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.data.formats.word_vectors import read_word_vectors, word_ids
from polyformer.data.tokenizers.tokenizer import Tokenizer
from polyformer.models.architectures import Transformer


@dataclasses.dataclass(frozen=True, kw_only=True)
class VectorsConfig(Config):
    """A file of word2vec or GloVe vectors; `frozen`: the token table is not trained."""

    path: str
    frozen: bool = False


def copy_vectors(config: VectorsConfig, model: Transformer, tokenizer: Tokenizer | None) -> str:
    """Copy the vectors of words into the rows of their tokens in every token table; return a note.

    The other rows do not change. Raises `InputError` for vectors with another width than the table, for an
    adaptive (clustered) table, and in the cases of `read_word_vectors`.
    """
    if tokenizer is None:
        raise InputError("vectors: this task reads no words; leave them out")
    tables = _tables(model)
    words = read_word_vectors(config.path, word_ids(tokenizer))
    for table in tables:
        if table.embedding_dim != words.width:
            raise InputError(
                f"vectors: {config.path} has vectors of {words.width} numbers, the token table of "
                f"{table.embedding_dim}; use --model.embedding.size {words.width}, with a matrix from there "
                "to hidden_size (in language models beside --model.tied false), or --model.hidden_size "
                f"{words.width}"
            )
        with torch.no_grad():
            ids, vectors = torch.from_numpy(words.ids), torch.from_numpy(words.vectors)
            table.weight[ids] = vectors.to(table.weight)
    covered, way = len(words.ids), "frozen" if config.frozen else "trained further"
    return (
        f"vectors of {config.path}: {covered:,} of {len(tokenizer):,} tokens are among its {words.words:,} "
        f"words; the others begin at random, all are {way}"
    )


def freeze_vectors(model: Transformer) -> None:
    """Freeze the token tables, including rows without a pretrained vector, and a tied output layer."""
    for table in _tables(model):
        table.weight.requires_grad_(False)


def _tables(model: Transformer) -> list[nn.Embedding]:
    tables = [table for table in (model.tokens, model.decoder_tokens) if table is not None]
    plain = [table for table in tables if isinstance(table, nn.Embedding)]
    if len(plain) < len(tables):
        raise InputError(
            "vectors: this model's token vectors are of several widths; leave out embedding.adaptive"
        )
    return plain
