"""The attention of a checkpoint by layer, and of fresh weights of its shape; and the senses of a word.

A word with two senses has different vectors in its sentences, and attention to different words.
"""

import itertools
import statistics
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from polyformer.cli.plots.model import matrices, spectra
from polyformer.core.errors import InputError, quote
from polyformer.data import Tokenizer
from polyformer.data.tokenizers import load_tokenizer
from polyformer.models.architectures import Transformer
from polyformer.models.checkpoints import from_pretrained
from polyformer_lab.cells import Cell, Row, measurement
from polyformer_lab.measures.texts import first_ids

T = TypeVar("T")


@measurement("layer")
def singular_values(
    cell: Cell, model: str, text: str, texts: int, length: int, fresh: bool = False
) -> Iterator[Row]:
    """Yield the share of the sum of all singular values that belongs to the greatest quarter.

    The rows are for all layers, for their lower half, for their upper half, then for each layer: means over
    heads and texts.

    Args:
        cell: its seed is the seed of fresh weights.
        model: the folder of an encoder.
        text: a file written by a preparation.
        texts: the number of rows that are read.
        length: tokens of each row.
        fresh: whether fresh weights are measured.
    """
    encoder = loaded(cell, model, fresh)
    if encoder.encoder is None:
        raise InputError("model: expected an encoder; a causal matrix is of full rank whatever it holds")
    rows = [{"input_ids": ids} for ids in _rows(model, text, texts, length)]
    shares = spectra(encoder, rows)["encoder"].at_quarter.mean(1).tolist()
    half = max(1, len(shares) // 2)
    parts = {"share": shares, "lower": shares[:half], "upper": shares[-half:]}
    yield {name: statistics.fmean(part) for name, part in parts.items()}
    yield from ({"layer": number, "share": share} for number, share in enumerate(shares, 1))


@measurement("layer")
def first_token(
    cell: Cell, model: str, text: str, texts: int, length: int, fresh: bool = False
) -> Iterator[Row]:
    """Yield the attention that each layer of a decoder gives to the first token: see `received`; means over
    texts.

    The options are the same as in `singular_values`.
    """
    for number, own in enumerate(_layers(cell, model, fresh, _rows(model, text, texts, length), received), 1):
        first, other, heads = map(statistics.fmean, zip(*own))
        yield {"layer": number, "first": first, "other": other, "heads": heads}


@measurement("layer")
def largest_keys(
    cell: Cell, model: str, text: str, texts: int, length: int, keys: int, fresh: bool = False
) -> Iterator[Row]:
    """Yield the share of a decoder's attention in each layer on the `keys` largest weights of a query.

    The other options are the same as in `singular_values`. The queries are the later half of each row.
    """

    def share(weights: Tensor) -> float:
        return float(_later(weights).topk(keys).values.sum(-1).mean())

    for number, own in enumerate(_layers(cell, model, fresh, _rows(model, text, texts, length), share), 1):
        yield {"layer": number, "share": statistics.fmean(own)}


def _layers(
    cell: Cell, model: str, fresh: bool, rows: list[Tensor], read: Callable[[Tensor], T]
) -> list[tuple[T, ...]]:
    """Return `read` of the attention [H, n, n] of each layer of a decoder, for each row."""
    decoder = loaded(cell, model, fresh)
    if decoder.decoder is None or decoder.encoder is not None:
        raise InputError("model: expected a decoder")
    by_row = [[read(layer) for layer in matrices(decoder, {"input_ids": ids})["decoder"]] for ids in rows]
    return list(zip(*by_row))


def _later(weights: Tensor) -> Tensor:
    """Return the weights [H, n / 2, n] of the later half of the queries."""
    return weights[:, weights.shape[1] // 2 :].float()


def received(weights: Tensor) -> tuple[float, float, float]:
    """Return the attention weights that the later half of the queries of one layer [H, n, n] gives.

    Returns:
        The share of the first token and the largest share of any other token, means over heads, and the
        share of the heads in which the first token gets the most.
    """
    shares = _later(weights).mean(1)  # [H, n]
    first, other = shares[:, 0], shares[:, 1:].max(1).values
    return float(first.mean()), float(other.mean()), float((first > other).float().mean())


def loaded(cell: Cell, folder: str, fresh: bool) -> Transformer:
    """Return a checkpoint for evaluation; with `fresh`, weights of the cell's seed in its shape."""
    model = from_pretrained(folder)
    if fresh:
        torch.manual_seed(cell.seed or 0)
        model = Transformer(model.config)
    return model.eval()


def _rows(model: str, text: str, texts: int, length: int) -> list[Tensor]:
    """Return rows of ids [1, length], the first tokens of a text."""
    ids = first_ids(text, load_tokenizer(model), texts * length)
    return list(torch.tensor(ids).view(texts, 1, length))


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
