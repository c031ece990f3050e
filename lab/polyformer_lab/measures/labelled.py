"""SST-2 and IMDB as short labelled texts, equal for every model, and the accuracy of simple classifiers."""

import collections
import importlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyformer.core.errors import InputError
from polyformer.core.files import atomic_write
from polyformer.core.imports import needs_extra
from polyformer.data import DataConfig, Tokenizer, TokenizerConfig, read
from polyformer.data.tokenizers.loading import load_tokenizer
from polyformer.training.recipes.recipe import with_data
from polyformer_lab.cells import Cell, Row, measurement, preparation

Labelled = list[tuple[str, str]]
"""Pairs of text and label."""

HEADERS = {"sst2": ("text", "label"), "imdb": ("label", "rating", "text")}
"""The columns of the files as published, which have no heading."""

TRAIN, TEST, FEW = "train.tsv", "test.tsv", "few.tsv"


@preparation
def labelled(folder: Path, vocabulary: int, sets: Mapping[str, Mapping[str, Any]]) -> None:
    """Write each set into a folder of its name: train.tsv, test.tsv and a tokenizer trained on the former.

    Args:
        folder: the output folder.
        vocabulary: the number of tokens of each tokenizer.
        sets: by name ("sst2", "imdb") the arguments of `chosen`.
    """
    for name, own in sets.items():
        parts = chosen(name, **own)
        for file, rows in parts.items():
            write_texts(folder / name / file, rows)
        choice = TokenizerConfig(algorithm="wordpiece", vocab_size=vocabulary, lowercase=True)
        Tokenizer.train(choice, (text for text, _ in parts[TRAIN])).save(folder / name)


def chosen(
    name: str, source: str, words: int, texts: int, tests: int, few: int | None = None
) -> dict[str, Labelled]:
    """Return texts of a set by file, evenly spread over the published files.

    A text of `words` words has `words` or more tokens, so that no model reads more than a bag of words.

    Args:
        name: the name of the set.
        source: its directory.
        words: the number of first words of each text that are kept.
        texts: the most training texts.
        tests: the most test texts.
        few: write this number of training texts into few.tsv.
    """
    if not Path(source).is_dir():
        raise InputError(
            f"{name}: expected a directory with train.tsv and test.tsv, gzipped or not, got {source}"
        )
    parts = {
        TRAIN: [(_cut(text, words), label) for text, label in spread(_rows(name, source, "path"), texts)],
        TEST: [(_cut(text, words), label) for text, label in spread(_rows(name, source, "test"), tests)],
    }
    return parts if few is None else {**parts, FEW: spread(parts[TRAIN], few)}


@preparation
def long_reviews(folder: Path, source: str, encoder: str, shortest: int, texts: int, tests: int) -> None:
    """Write the long reviews of IMDB, evenly spread, into train.tsv and test.tsv.

    Args:
        folder: the output folder.
        source: the directory of IMDB.
        encoder: the folder of a checkpoint with the tokenizer that measures length.
        shortest: the fewest tokens of a long review.
        texts: the number of training reviews.
        tests: the number of test reviews.

    Raises:
        InputError: there are too few long reviews.
    """
    tokenizer = load_tokenizer(encoder)
    for argument, count, file, role in (("texts", texts, TRAIN, "path"), ("tests", tests, TEST, "test")):
        rows = _rows("imdb", source, role)
        lengths = map(len, tokenizer.encode_batch([text for text, _ in rows]))
        long = [row for row, length in zip(rows, lengths) if length >= shortest]
        if len(long) < count:
            raise InputError(
                f"{argument}: expected at most the {len(long)} reviews of {shortest} tokens or more, got "
                f"{count}; take fewer, or a smaller `shortest`"
            )
        write_texts(folder / file, spread(long, count))


def _rows(name: str, source: str, role: str) -> Labelled:
    paths = with_data({"path": TRAIN, "test": TEST}, source)
    data = DataConfig(format="tsv", header=HEADERS[name])
    return [
        (str(row["text"]), str(row["label"])) for row in map(dict, read(data, HEADERS["sst2"], paths[role]))
    ]


def _cut(text: str, words: int) -> str:
    return " ".join(text.split()[:words])


def spread(rows: Sequence[Any], most: int) -> list[Any]:
    """Return at most `count` rows, evenly spread."""
    count = min(most, len(rows))
    return [rows[i * len(rows) // count] for i in range(count)]


def write_texts(file: Path, rows: Iterable[tuple[str, str]]) -> None:
    """Write texts with their labels, below a heading."""
    lines = ["text\tlabel", *(f"{text}\t{label}" for text, label in rows)]
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(file, ("\n".join(lines) + "\n").encode())


def read_texts(file: Path) -> Labelled:
    """Return the texts and labels of a file written by `write_texts`."""
    _, *lines = file.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    return [(text, label) for text, _, label in (line.partition("\t") for line in lines)]


@measurement()
def bag_of_words(cell: Cell, folder: str) -> Row:
    """Return the results of a classifier without a model: test accuracy of logistic regression on word
    counts.

    greater_class: the share of test texts that have the most frequent label of the training texts.
    """
    (train, labels), (test, truth) = (zip(*read_texts(Path(folder, file))) for file in (TRAIN, TEST))
    counts = sklearn("feature_extraction.text").CountVectorizer()
    model = sklearn("linear_model").LogisticRegression(max_iter=300, C=0.1)
    model.fit(counts.fit_transform(train), labels)
    greater = collections.Counter(labels).most_common(1)[0][0]
    return {
        "test.accuracy": float(model.score(counts.transform(test), truth)),
        "greater_class": truth.count(greater) / len(truth),
    }


def sklearn(module: str) -> Any:
    """Return a module of scikit-learn; `InputError` where it is not installed."""
    with needs_extra("image", "linear classifiers are scikit-learn's, which is not installed"):
        return importlib.import_module(f"sklearn.{module}")
