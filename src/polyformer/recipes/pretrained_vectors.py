"""A token table that begins with pretrained word vectors, frozen or not: `--pretrained-vectors FILE`."""

import dataclasses

import torch
from torch import nn

from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.data.tokenizer import Tokenizer
from polyformer.data.word_vectors import read_word_vectors, word_ids
from polyformer.model import Transformer


@dataclasses.dataclass(frozen=True, kw_only=True)
class VectorsConfig(Config):
    """A file of word2vec or GloVe; `frozen`: the token table is not trained."""

    path: str
    frozen: bool = False


def copy_vectors(config: VectorsConfig, model: Transformer, tokenizer: Tokenizer | None) -> str:
    """Put the vectors of the tokens that are words into every token table; returns what to say of it.

    The other rows stay as they are. Raises `InputError` for vectors of another width than the table's, for a
    table of clusters, and as `read_word_vectors` does.
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
    """No gradients for the token tables, rows without a pretrained vector and a tied output too."""
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
