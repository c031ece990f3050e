"""Retrieval of the document from which a passage was removed, by the embeddings of an encoder."""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.core.measuring import time_once
from polyformer.data import DataConfig, Tokenizer
from polyformer.data.sources.files import opened
from polyformer.data.tokenizers.loading import load_tokenizer
from polyformer.models.architectures import Transformer
from polyformer.models.checkpoints import convert, from_pretrained
from polyformer.nn.heads import EmbedConfig
from polyformer_lab.cells import Cell, Row, measurement
from polyformer_lab.measures.texts import texts_of

CHAPTER = re.compile(r"^CHAPTER [IVXLC\d]+\.?\s*$", re.MULTILINE)

REVIEWS = ("label", "rating", "text")


@measurement()
def passages(
    cell: Cell,
    model: str,
    text: str,
    documents: int,
    passage: int,
    short: int,
    length: int,
    attention: str | None = None,
    whole: bool = False,
) -> Row:
    """Return how well passages retrieve their documents, and the seconds to embed the documents.

    Args:
        cell: its seed determines the places of the passages.
        model: the folder of an encoder of sentences.
        text: the file of a book with chapters, or a .tsv of reviews (label, rating, text).
        documents: the number of documents, the longest of the text.
        passage: tokens of a passage.
        short: tokens that the encoder reads without conversion; documents are at least twice as long.
        length: tokens of a document that are read; for more than `short` the encoder is converted.
        attention: the attention of the converted encoder, by default its own.
        whole: whether a document's vector is the mean over its pieces of `length`.
    """
    encoder, tokenizer = embedding(model), load_tokenizer(model)
    rows = [tokenizer.encode(each) for each in documents_of(text)]
    rows = sorted((ids for ids in rows if len(ids) >= 2 * short), key=len)[-documents:]
    if len(rows) < 2:
        raise InputError(
            f"{text}: expected two documents or more of {2 * short} tokens, got {len(rows)}; take a smaller "
            "--measure.short, or other documents"
        )
    taken, rest = cut_out(rows, passage, cell.seed or 0)
    queries = vectors(encoder, tokenizer, taken, short)
    if length > short:
        positions = max(length, encoder.config.max_position_embeddings)
        encoder, _ = convert(encoder, attention, max_positions=positions)
    embedded: list[Tensor] = []
    seconds = time_once(lambda: embedded.append(vectors(encoder, tokenizer, rest, length, whole)))
    return {**ranked(queries, embedded[0]), "seconds": seconds}


def embedding(folder: str) -> Transformer:
    """Return the checkpoint with an embedding head, which a folder of sentence-transformers lacks."""
    model = from_pretrained(folder)
    return (model if isinstance(model.config.head, EmbedConfig) else from_pretrained(folder, "embed")).eval()


def documents_of(file: str) -> list[str]:
    """Return the chapters of a book, or reviews."""
    if ".tsv" in Path(file).suffixes:
        return list(texts_of(DataConfig(path=file, format="tsv", header=REVIEWS)))
    with opened(Path(file)) as text:
        return CHAPTER.split(text.read().replace("\r\n", "\n"))[1:]


def cut_out(rows: Sequence[list[int]], length: int, seed: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return a passage of each document, at a random place, and the documents without it."""
    generator = np.random.default_rng(seed)
    places = [int(generator.integers(len(ids) - length)) for ids in rows]
    taken = [ids[start : start + length] for ids, start in zip(rows, places)]
    return taken, [ids[:start] + ids[start + length :] for ids, start in zip(rows, places)]


@torch.no_grad()
def vectors(
    model: Transformer, tokenizer: Tokenizer, rows: Sequence[list[int]], length: int, whole: bool = False
) -> Tensor:
    """Return a vector of each text [n, E], cut to `length` tokens; with `whole` the mean over its pieces."""
    first, last = ([x for x in (token,) if x is not None] for token in (tokenizer.cls_id, tokenizer.sep_id))
    step, embedded = length - len(first) - len(last), []
    for ids in rows:
        starts = range(0, len(ids), step) if whole else (0,)
        pieces = [torch.tensor([[*first, *ids[start : start + step], *last]]) for start in starts]
        embedded.append(torch.cat([model(piece).logits for piece in pieces]).mean(0))
    return torch.stack(embedded)


def ranked(queries: Tensor, documents: Tensor) -> dict[str, float]:
    """Return how well query i retrieves document i by their cosine.

    Returns:
        The share of queries whose document is the first (`first`) or among the first ten (`tenth`), and the
        mean of 1 / rank (`reciprocal`).
    """
    scores = F.normalize(queries, dim=-1) @ F.normalize(documents, dim=-1).T
    ranks = (scores > scores.diagonal()[:, None]).sum(1) + 1
    first, tenth = (float((ranks <= most).double().mean()) for most in (1, 10))
    return {"first": first, "tenth": tenth, "reciprocal": float((1 / ranks.double()).mean())}
