"""SST-2 and IMDB as short labelled texts, equal for every model, and what simple classifiers make of them."""

import collections
import dataclasses
import importlib
from pathlib import Path
from typing import Any

from polyformer.core.errors import InputError
from polyformer.core.files import atomic_write
from polyformer.data import DataConfig, Tokenizer, TokenizerConfig, read
from polyformer.recipes.find import with_data

Labelled = list[tuple[str, str]]
"""Pairs of text and label."""


@dataclasses.dataclass(frozen=True)
class Source:
    """A set as published: its name, and the columns of its files, which have no heading."""

    title: str
    header: tuple[str, ...]


SETS = {"sst2": Source("SST-2", ("text", "label")), "imdb": Source("IMDB", ("label", "rating", "text"))}


@dataclasses.dataclass(frozen=True)
class Texts:
    """The chosen texts of a set, in `folder` as train.tsv and test.tsv, and a tokenizer learnt from them."""

    train: Labelled
    test: Labelled
    folder: Path
    tokenizer: Path

    @property
    def labels(self) -> list[str]:
        """The classes of the training texts, sorted."""
        return sorted({label for _, label in self.train})


def prepare(name: str, source: str, words: int, texts: int, tests: int, vocabulary: int, out: Path) -> Texts:
    """At most `texts` and `tests` of the set `name` in the directory `source`, each cut to `words`, in `out`.

    A text of so many words has at least as many tokens, so that no model reads more than a bag of words does.
    """
    if not Path(source).is_dir():
        raise InputError(
            f"{name}: expected a directory with train.tsv and test.tsv, gzipped or not, got {source}"
        )
    header = SETS[name].header
    paths = with_data({"path": "train.tsv", "test": "test.tsv"}, source)
    data = DataConfig(format="tsv", header=header)
    train, test = (
        _cut(read(data, ("text", "label"), paths[role]), most, words)
        for role, most in (("path", texts), ("test", tests))
    )
    out = out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    for stem, part in (("train", train), ("test", test)):
        lines = ["text\tlabel", *(f"{text}\t{label}" for text, label in part)]
        atomic_write(out / f"{stem}.tsv", ("\n".join(lines) + "\n").encode())
    choice = TokenizerConfig(algorithm="wordpiece", vocab_size=vocabulary, lowercase=True)
    tokenizer = Tokenizer.train(choice, (text for text, _ in train))
    return Texts(train, test, out, tokenizer.save(out))


def greater_class(texts: Texts) -> float:
    """The share of test texts that have the commonest label of the training texts."""
    label = collections.Counter(label for _, label in texts.train).most_common(1)[0][0]
    return sum(truth == label for _, truth in texts.test) / len(texts.test)


def bag_of_words(texts: Texts) -> float:
    """The test accuracy of logistic regression on the counts of words."""
    try:
        extraction = importlib.import_module("sklearn.feature_extraction.text")
        linear = importlib.import_module("sklearn.linear_model")
    except ImportError as error:
        raise InputError(
            "the bag of words is scikit-learn's, which is not installed; pip install 'polyformer[image]'"
        ) from error
    counts = extraction.CountVectorizer()
    train = counts.fit_transform([text for text, _ in texts.train])
    model = linear.LogisticRegression(max_iter=300, C=0.1).fit(train, [label for _, label in texts.train])
    return float(
        model.score(counts.transform([text for text, _ in texts.test]), [label for _, label in texts.test])
    )


def _cut(rows: Any, most: int, words: int) -> Labelled:
    """At most so many of the rows, evenly spread, with the first words of each text."""
    count = min(most, len(rows))
    chosen = (rows[i * len(rows) // count] for i in range(count))
    return [(" ".join(row["text"].split()[:words]), row["label"]) for row in chosen]
