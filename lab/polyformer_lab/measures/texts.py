"""Preparations that write texts, and simple classifiers of the labelled ones.

Texts are a document on each line of train.jsonl and validation.jsonl; opening sentences are summaries of
short texts. Labelled texts are those of SST-2 and IMDB, equal for every model; in pairs the question is which
of the two has the second label.
"""

import collections
import importlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyformer.core.errors import InputError
from polyformer.core.files import atomic_write
from polyformer.core.imports import needs_extra
from polyformer.data import DataConfig, Tokenizer, TokenizerConfig, load, read
from polyformer.data.formats.published import HEADING
from polyformer.data.formats.readers import PIECE
from polyformer.data.sources.files import opened
from polyformer.data.tokenizers import load_tokenizer
from polyformer.training.recipes.recipe import with_data
from polyformer_lab.cells import Cell, Row, measurement, preparation
from polyformer_lab.machine import SOURCES

CHARACTERS = 8
"""The most characters of a token, on average."""

HELD_OUT = 20
"""The share of a book that is held out, from its end."""

BOOK = re.compile(r"^\*\*\* ?START OF [^\n]*\n(.*?)^\*\*\* ?END OF ", re.DOTALL | re.MULTILINE)
"""The lines that separate the book from Project Gutenberg's own text before and after it."""

SPLITS = "train", "validation"


@preparation
def documents(folder: Path, text: str | None) -> None:
    """Write all documents of a text.

    Args:
        folder: the output folder.
        text: the directory of WikiText-2, the file of a book, or None for the default text.
    """
    for split, rows in split_texts(text).items():
        write_rows(folder, split, rows)


@preparation
def beginnings(folder: Path, text: str | None, train: int, validation: int) -> None:
    """Write the beginning of each split as one document, long enough for the required number of tokens."""
    for split, tokens in (("train", train), ("validation", validation)):
        whole = "".join(split_texts(text)[split])
        write_rows(folder, split, [whole[: CHARACTERS * tokens]])


@preparation
def articles(folder: Path, text: str, characters: int, held_out: int) -> None:
    """Write the first articles of each split of WikiText-2, also of the test text.

    Args:
        folder: the output folder.
        text: the directory of WikiText-2.
        characters: the number of characters of the training text, to the end of an article.
        held_out: the number of characters of each other text.
    """
    for split, name in {"train": "train", "validation": "valid", "test": "test"}.items():
        files = {"path": f"{name}.txt.gz", "format": "articles", "streaming": True}
        data = DataConfig.from_dict(with_data(files, text))
        left, rows = characters if split == "train" else held_out, list[str]()
        for article in texts_of(data):
            if left <= 0:
                break
            rows.append(article)
            left -= len(article)
        write_rows(folder, split, rows)


def split_texts(text: str | None) -> dict[str, Iterator[str]]:
    """Return the documents of a text, given as for `documents`, by their split."""
    if text is not None and Path(text).is_file():
        return {split: pieces(part) for split, part in zip(SPLITS, book(text))}
    described = with_data(dict(SOURCES["wikitext2"].data or {}), text) if text else {}
    splits = load(DataConfig.from_dict(described), ("text",))
    return {split: (str(dict(row)["text"]) for row in getattr(splits, split)) for split in SPLITS}


def book(file: str) -> tuple[str, str]:
    """Return a book without its last twentieth, and that last part.

    Raises:
        InputError: the book is too short.
    """
    with opened(Path(file)) as text:
        whole = text.read().replace("\r\n", "\n")
    marked = BOOK.search(whole)
    whole = marked[1] if marked else whole
    cut = whole.find("\n", len(whole) - len(whole) // HELD_OUT) + 1
    if not whole[:cut].strip() or not whole[cut:].strip():
        raise InputError(f"{file}: too short a book to hold out the last twentieth; take a longer book")
    return whole[:cut], whole[cut:]


def pieces(text: str) -> Iterator[str]:
    """Yield documents in the units of a text file: `PIECE` characters and the rest of the line."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + PIECE) + 1 or len(text)
        yield text[start:end]
        start = end


def texts_of(data: DataConfig) -> Iterator[str]:
    """Yield the texts of a source lazily."""
    return (str(dict(row)["text"]) for row in read(data, ("text",), data.path))


def write_rows(folder: Path, split: str, rows: Iterable[str]) -> None:
    """Write the documents of a split."""
    write_lines(folder, split, ({"text": row} for row in rows))


def write_lines(folder: Path, split: str, rows: Iterable[Mapping[str, str]]) -> None:
    """Write the rows of a split as lines of JSON."""
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    atomic_write(folder / f"{split}.jsonl", lines.encode())


def first_ids(file: str, tokenizer: Any, count: int) -> list[int]:
    """Return the first `count` token ids of the first document in a file written by a preparation.

    Raises:
        InputError: the text is shorter.
    """
    with open(file, encoding="utf-8") as lines:
        text = json.loads(lines.readline())["text"]
    ids = tokenizer.encode(text)[:count]
    if len(ids) < count:
        raise InputError(f"data: expected {count} tokens or more, got {len(ids)}; take a longer text")
    return ids


END = " . "
"""The end of a sentence in WikiText, which separates full stops from words, except those of abbreviations."""

WORDS = range(5, 26)
"""Numbers of words of a sentence that is a summary, with its full stop."""


@preparation
def opening_sentences(folder: Path, text: str, words: int, train: int, validation: int) -> None:
    """Write train.jsonl and validation.jsonl with pairs from paragraphs of WikiText-2.

    The source is the beginning of a paragraph, the target its first sentence. Paragraphs of a single sentence
    and those with another number of words in the first than `WORDS` are left out.

    Args:
        folder: the output folder.
        text: the directory of WikiText-2.
        words: the number of words of a source, or fewer in a short paragraph.
        train: the most training pairs.
        validation: the most validation pairs.
    """
    for split, file, most in (("train", "train", train), ("validation", "valid", validation)):
        rows = itertools.islice(_pairs(text, f"{file}.txt.gz", words), most)
        write_lines(folder, split, rows)


def _pairs(text: str, file: str, words: int) -> Iterator[dict[str, str]]:
    data = DataConfig.from_dict(with_data({"path": file, "format": "lines", "streaming": True}, text))
    for line in map(str.strip, texts_of(data)):
        first, end, rest = line.partition(END)
        if rest and len((first + end).split()) in WORDS and not HEADING.fullmatch(line):
            yield {"source": " ".join(line.split()[:words]), "target": first + end.rstrip()}


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


PairOfTexts = tuple[str, str, str]
"""Two texts, and "0" or "1" for the place of the text with label 1."""


@preparation
def labelled_pairs(folder: Path, vocabulary: int, sets: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the sets as `labelled` does, and the pairs of each into a folder with the ending "-pairs".

    Args:
        folder: the output folder.
        vocabulary: the number of tokens of each tokenizer.
        sets: by name the arguments of `labelled.chosen`.
    """
    labelled(folder, vocabulary, sets)
    for name in sets:
        out = folder / f"{name}-pairs"
        out.mkdir()
        for file in (TRAIN, TEST):
            rows = opposites(read_texts(folder / name / file))
            lines = ["text\tpair\tlabel", *map("\t".join, rows)]
            atomic_write(out / file, ("\n".join(lines) + "\n").encode())


def opposites(rows: Sequence[tuple[str, str]]) -> list[PairOfTexts]:
    """Return pairs of a text with label 0 and a text with label 1, in both orders equally often.

    Each text of the less frequent label is in a pair of each order, with different partners.
    """
    by_label = [[text for text, own in rows if own == label] for label in "01"]
    count = min(map(len, by_label))
    zeros, ones = (texts[:count] for texts in by_label)
    later = [*ones[1:], *ones[:1]]
    pairs = zip(zip(ones, zeros, "0" * count), zip(zeros, later, "1" * count))
    return [pair for both in pairs for pair in both]
