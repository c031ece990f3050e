"""Encoders without further training: probes, and retrieval by their vectors.

A probe is a logistic regression on the mean of a layer's outputs over a text. Layer and regularization are
chosen on every tenth training text, for every encoder alike; the test texts are not used for any choice.

Vectors retrieve translations, and the document from which a passage was removed.
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.core.measuring import time_once
from polyformer.data import DataConfig, Tokenizer, read
from polyformer.data.sources.files import opened
from polyformer.data.tokenizers import load_tokenizer
from polyformer.models.architectures import Transformer
from polyformer.models.checkpoints import config_of, convert, from_pretrained
from polyformer.nn.heads import EmbedConfig
from polyformer.training.recipes import Run
from polyformer.training.recipes.recipe import with_data
from polyformer.training.tasks import TextTask
from polyformer_lab.cells import Cell, Row, measurement, preparation
from polyformer_lab.measures.compute import operations
from polyformer_lab.measures.scores import scores
from polyformer_lab.measures.texts import TEST, TRAIN, Labelled, read_texts, sklearn, texts_of, write_lines

INVERSE_WEIGHTS = (0.01, 0.1, 1.0)
"""The candidates for C of the logistic regression; the best on the validation texts is chosen."""

ASIDE = 10
"""The step between the training texts that choose layer and regularization."""


@measurement()
def probe(cell: Cell, texts: str, untrained: str | None = None) -> Row:
    """Return the accuracy of probes, and the scores and counted operations of the pre-training.

    Args:
        cell: a pre-training by masked modelling or ELECTRA.
        texts: a folder written by `labelled`.
        untrained: instead of the cell's encoder, fresh weights of the encoder of the run in this folder.
    """
    train, test = (read_texts(Path(texts, file)) for file in (TRAIN, TEST))
    if untrained is not None:
        run = Run.open(untrained)
        torch.manual_seed(cell.seed or 0)
        task, fresh = run.recipe.task.build(run.tokenizer), Transformer(config_of(untrained)).eval()
        assert isinstance(task, TextTask)
        return probed(task, fresh, train, test)
    fitted, task = cell.fitted, cell.fitted.task
    assert isinstance(task, TextTask)
    counted = operations(task.config, fitted.model.config) * task.config.batch_tokens * fitted.result.step
    return {**probed(task, fitted.model, train, test), **scores(cell), "operations": counted}


def probed(task: TextTask, model: Transformer, train: Labelled, test: Labelled) -> Row:
    """Return the test accuracy of the chosen layer (0: the embedding), the layer, and the last layer's
    accuracy.
    """
    inputs, held_out = (features(task, model, [text for text, _ in part]) for part in (train, test))
    labels, wanted = (np.array([label for _, label in part]) for part in (train, test))
    aside = np.arange(len(labels)) % ASIDE == 0
    tried = []
    for layer, x in enumerate(inputs):
        for inverse_weight in INVERSE_WEIGHTS:
            right = _regression(x[~aside], labels[~aside], inverse_weight).score(x[aside], labels[aside])
            tried.append((right, layer, inverse_weight))
    last = len(inputs) - 1
    accuracy = {}
    for layers in (range(last + 1), (last,)):
        _, layer, inverse_weight = max(trial for trial in tried if trial[1] in layers)
        regression = _regression(inputs[layer], labels, inverse_weight)
        accuracy[layer] = float(regression.score(held_out[layer], wanted))
    best = max(tried)[1]
    return {"test.accuracy": accuracy[best], "layer": best, "last_layer": accuracy[last]}


def _regression(x: np.ndarray, labels: np.ndarray, inverse_weight: float) -> Any:
    linear = sklearn("linear_model").LogisticRegression(C=inverse_weight, max_iter=1000)
    return sklearn("pipeline").make_pipeline(sklearn("preprocessing").StandardScaler(), linear).fit(x, labels)


@torch.no_grad()
def features(task: TextTask, model: Transformer, texts: Sequence[str]) -> np.ndarray:
    """Return [layers + 1, texts, E]: means over a text's tokens of the embedding and the layers' outputs."""
    cls, sep = task.tokenizer.cls_id, task.tokenizer.sep_id
    assert cls is not None
    assert sep is not None
    limit = model.config.max_position_embeddings
    rows = [[cls, *ids[: limit - 2], sep] for ids in task.tokenizer.encode_batch(list(texts))]
    features: list[np.ndarray] = [np.empty(0)] * len(rows)
    for chosen, batch in task.rows.batched(model, rows):
        states = model(**batch, output_hidden_states=True).hidden_states
        mask = batch["attention_mask"].unsqueeze(-1)
        means = torch.stack([(state * mask).sum(1) / mask.sum(1) for state in states], 1).cpu().numpy()
        for row, mean in zip(chosen, means):
            features[row] = mean
    return np.stack(features, 1)


SIDES = ("source", "target")


@preparation
def directions(folder: Path, source: str, rare: int, common: int, held_out: int) -> None:
    """Write pairs of Multi30k; each source begins with the name of the target language.

    The files are rare.jsonl (German to English), both.jsonl (these pairs, and English to German with other
    sentences), and validation.jsonl (German to English).

    Args:
        folder: the output folder.
        source: the directory of Multi30k.
        rare: the number of pairs of German to English.
        common: the number of pairs of English to German, the sentences after the rare pairs.
        held_out: the number of validation pairs.
    """
    english = _pairs(source, "train", rare + common)
    few = [_marked("en", german, text) for text, german in english[:rare]]
    many = [_marked("de", text, german) for text, german in english[rare:]]
    held = [_marked("en", german, text) for text, german in _pairs(source, "val", held_out)]
    for name, rows in {"rare": few, "both": few + many, "validation": held}.items():
        write_lines(folder, name, rows)


def _pairs(folder: str, split: str, count: int) -> list[tuple[str, ...]]:
    return list(zip(*first_sentences(folder, f"{split}.{{en,de}}.gz", count)))


def first_sentences(folder: str, files: str, count: int) -> list[list[str]]:
    """Return the first sources, and the first targets, of two files in the directory of Multi30k."""
    data = DataConfig.from_dict(with_data({"path": files}, folder))
    rows = [dict(row) for row in itertools.islice(read(data, SIDES, data.path), count)]
    return [[str(row[side]) for row in rows] for side in SIDES]


def _marked(language: str, source: str, target: str) -> dict[str, str]:
    return dict(zip(SIDES, (f"={language} {source}", target)))


@measurement("layer")
def sentence_retrieval(
    cell: Cell, folder: str, sentences: int, languages: Sequence[str] = ("en", "de")
) -> Iterator[Row]:
    """Yield by layer (0: the embedding) the accuracy with which sentences find their translations.

    The last row has the validation loss of the training as well.

    Args:
        cell: a pre-training of an encoder.
        folder: the directory of Multi30k; its test text is read.
        sentences: the number of its first sentences, among which each translation is searched.
        languages: the languages of source and target.
    """
    fitted = cell.fitted
    assert isinstance(fitted.task, TextTask)
    files = f"test_2016_flickr.{{{','.join(languages)}}}.gz"
    both = first_sentences(folder, files, sentences)
    vectors = [features(fitted.task, fitted.model, texts) for texts in both]
    losses = {"validation.loss": fitted.scores["validation"]["loss"]}
    for layer, (source, target) in enumerate(zip(*vectors)):
        last = losses if layer == len(vectors[0]) - 1 else {}
        yield {"layer": layer, "accuracy": matched(source, target), **last}


def matched(source: np.ndarray, target: np.ndarray) -> float:
    """Return the share of rows [N, E] with the largest cosine at their own row of the other side.

    It is the mean of both directions. The mean over the rows of each side is subtracted, as all sentences of
    a language share a direction.
    """
    centred = [side - side.mean(0) for side in (source, target)]
    first, second = (side / np.linalg.norm(side, axis=1, keepdims=True) for side in centred)
    cosines = first @ second.T
    right = np.arange(len(cosines))
    return float(np.mean([(each.argmax(1) == right).mean() for each in (cosines, cosines.T)]))


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
