"""Measure the vectors of a word with two senses, and the attention within sentences."""

import itertools
import statistics

import torch
from torch import Tensor

from polyformer.cli.plots.heads import matrices
from polyformer.core.errors import InputError, quote
from polyformer.data import Tokenizer
from polyformer.data.tokenizers.loading import load_tokenizer
from polyformer.models.architectures import Transformer
from polyformer_lab.cells import Cell, Row, measurement
from polyformer_lab.measures.attention import loaded

SPECIAL = -1
"""The side of tokens that belong to no sentence."""


@measurement()
def senses(
    cell: Cell, model: str, word: str, first: list[str], second: list[str], fresh: bool = False
) -> Row:
    """Return how well vectors tell the senses of a word, and how often words attend within their sentence.

    Args:
        cell: its seed is the seed of fresh weights.
        model: the folder of an encoder.
        word: a word in all sentences.
        first: sentences with one sense.
        second: as many sentences with the other sense; each follows a sentence of `first` in a pair.
        fresh: whether fresh weights are measured.

    Returns:
        accuracy: of the nearest mean vector of the word, without the vector itself.
        same: see `within`, as a mean over pairs, layers and heads.
    """
    encoder, tokenizer = loaded(cell, model, fresh), load_tokenizer(model)
    groups = [
        torch.stack([_word_vector(encoder, tokenizer, sentence, word) for sentence in sentences])
        for sentences in (first, second)
    ]
    shares = []
    for pair in zip(first, second, strict=True):
        ids, types = tokenizer.encode_for_model(*pair)
        row = {"input_ids": torch.tensor([ids]), "token_type_ids": torch.tensor([types])}
        if encoder.encoder is not None and encoder.config.embedding.type_vocab_size < 2:
            del row["token_type_ids"]
        sides = torch.full((len(ids),), SPECIAL)
        for side, sentence in enumerate(pair):
            sides[_place(ids, tokenizer.encode(sentence), sentence, last=side == 1)] = side
        shares += [within(layer, sides) for layer in matrices(encoder, row)["encoder"]]
    return {"accuracy": separated(*groups), "same": statistics.fmean(shares)}


def separated(first: Tensor, second: Tensor) -> float:
    """Return the share of the vectors [N, D] nearer to the mean of the others of their group."""
    right = []
    for own, other in itertools.permutations((first, second)):
        for index, vector in enumerate(own):
            rest = torch.cat([own[:index], own[index + 1 :]]).mean(0)
            right.append(float((vector - rest).norm() < (vector - other.mean(0)).norm()))
    return statistics.fmean(right)


def within(weights: Tensor, sides: Tensor) -> float:
    """Return the share of queries with their largest weight on a token of the same side.

    weights [H, n, n]; sides [n]. The token itself and tokens without a side do not count.
    """
    tokens = sides != SPECIAL
    others = weights.masked_fill(~tokens | torch.eye(len(sides), dtype=torch.bool), -1)
    return float((sides[others.argmax(-1)] == sides)[:, tokens].float().mean())


def _word_vector(encoder: Transformer, tokenizer: Tokenizer, sentence: str, word: str) -> Tensor:
    """Return the mean of the last hidden states of a word's tokens."""
    ids, _ = tokenizer.encode_for_model(sentence)
    with torch.no_grad():
        hidden = encoder(torch.tensor([ids])).last_hidden_state
    return hidden[0, _place(ids, tokenizer.encode(word), sentence)].mean(0)


def _place(ids: list[int], part: list[int], sentence: str, last: bool = False) -> slice:
    """Return the place of the tokens `part` in `ids`: the first, or with `last` the last."""
    starts = [i for i in range(len(ids) - len(part) + 1) if ids[i : i + len(part)] == part]
    if not starts:
        raise InputError(f"{quote(sentence)}: the word or sentence is cut into other tokens there")
    start = starts[-1 if last else 0]
    return slice(start, start + len(part))
