"""Baselines of a finished run: what simpler methods reach on the same held-out rows, for every kind of task.

    language model     uniform distribution, n-gram model
    model of pixels    uniform distribution, each pixel by itself
    texts with labels  most frequent label, logistic regression on a bag of words
    pairs with labels  the same, and logistic regression on the share of common words
    images with labels most frequent label, nearest mean of a class
    tags               most frequent tag of each word
    translation        the source itself; for summaries its first sentences
    answers            the part of the context that shares most words with the question

All of them learn from the training rows only.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyformer.core.host_values import IGNORED
from polyformer.data import Splits
from polyformer.data.formats.questions_and_summaries import lead, rouge
from polyformer.training.recipes.report import Row
from polyformer.training.tasks import (
    Classification,
    ImageClassification,
    ImageModelling,
    LanguageModelling,
    QuestionAnswering,
    Summarization,
    Tagging,
    Task,
    Translation,
)
from polyformer.training.tasks.classify import PairClassification
from polyformer.training.tasks.labels import SingleLabelTask
from polyformer.training.tasks.lm import text_metrics
from polyformer.training.tasks.ngram import NGram
from polyformer.training.tasks.qa import exact_match, f1

Rows = Sequence[dict[str, Any]]

WORD = re.compile(r"\w+")
WORDS = 50_000
"""The most frequent words of the training texts that a bag of words counts."""

READ_ROWS = 20_000
"""Training rows that a baseline learns from, so that it takes seconds."""


def baselines(task: Task, splits: Splits) -> list[Row]:
    """Return the names of the baselines of `task` and their metrics on the validation rows.

    Empty without validation rows, for streamed rows, and for tasks without a baseline.
    """
    methods = [method for kind, method in METHODS if isinstance(task, kind)]
    if not methods or splits.validation is None or not hasattr(splits.train, "__len__"):
        return []
    return methods[0](task, splits.train, list(splits.validation))


def verdict(task: Task, rows: Sequence[Row], scores: dict[str, float]) -> str:
    """Return a sentence that says whether `scores` of the model beat the best of the baselines `rows`.

    They are compared by the metric of the task that chooses checkpoints, or by the first that both have.
    """
    shared = [name for name in (task.best, *rows[0][1]) if name in scores and all(name in r for _, r in rows)]
    if not shared:
        return ""
    name = shared[0]
    sign = -1.0 if name == "loss" or (name == task.best and task.direction == "min") else 1.0
    title, best = max(rows, key=lambda row: sign * row[1][name])
    beats = sign * scores[name] > sign * best[name]
    what = name.replace("_", " ")
    return (
        f"This model {'beats' if beats else 'does not beat'} the best baseline, {title}: "
        f"{what} {scores[name]:.4g} against {best[name]:.4g}."
    )


def text_baselines(task: LanguageModelling, train: Any, held: Rows) -> list[Row]:
    """Return the metrics of the uniform distribution over tokens and of an n-gram model.

    Both are measured on the same tokens as the model, with the same counts of words and bytes.
    """
    order = task.config.ngram_order
    if not order:
        return []
    documents, counts = task.documents(held), task.count(held)
    vocabulary = len(task.tokenizer)
    tokens = sum(len(document) - 1 for document in documents)
    rows = [("uniform", text_metrics(tokens * math.log(vocabulary), tokens, counts))]
    model = NGram(task.documents(list(train)), order, vocabulary)
    return [*rows, (f"{order}-gram (Kneser-Ney)", text_metrics(*model.nats(documents), counts))]


def pixel_baselines(task: ImageModelling, train: Any, held: Rows) -> list[Row]:
    """Return the metrics of a uniform guess, and of the level frequencies of each pixel.

    The frequencies are smoothed by one count of every level, so that no level is impossible (Laplace).
    """
    labels = (np.stack([row["labels"] for row in task.prepare(list(rows))]) for rows in (train, held))
    known, levels = (rows[:, rows[0] != IGNORED] for rows in labels)  # levels [images, pixels]
    place = np.arange(known.shape[1])
    counts = np.ones((known.shape[1], task.levels))
    for image in known:
        counts[place, image] += 1
    nats = -np.log(counts / counts.sum(1, keepdims=True))[place, levels].sum()
    even = levels.size * math.log(task.levels)
    return [
        (name, task.metrics([float(sum_), levels.size], {}))
        for name, sum_ in (("uniform", even), ("each pixel by itself", nats))
    ]


def label_baselines(task: Classification, train: Any, held: Rows) -> list[Row]:
    """Return the metrics of the most frequent label, and of logistic regressions on words."""
    known = list(islice(train, READ_ROWS))
    labels, truth = label_ids(task, known), label_ids(task, held)
    columns = task.config.text_columns
    bags = [[_bag(row, columns) for row in rows] for rows in (known, held)]
    vocabulary = {
        word: number
        for number, (word, _) in enumerate(Counter(w for bag in bags[0] for w in bag).most_common(WORDS))
    }
    features = [_counts(rows, vocabulary) for rows in bags]
    named = {"logistic regression, bag of words": features}
    if isinstance(task, PairClassification):
        named["logistic regression, common words"] = [_common_words(rows) for rows in (known, held)]
    rows = [majority(task, labels, truth)]
    for name, (before, after) in named.items():
        predicted = logistic_regression(before, labels, len(task.labels))(after)
        rows.append((name, predicted_metrics(task, truth, predicted)))
    return rows


def image_label_baselines(task: ImageClassification, train: Any, held: Rows) -> list[Row]:
    """Return the metrics of the most frequent label, and of the label with the nearest mean image."""
    known = list(islice(train, READ_ROWS))
    labels, truth = label_ids(task, known), label_ids(task, held)
    pixels = [
        torch.from_numpy(np.stack([task.config.pixels(row).ravel() for row in rows])).float()
        for rows in (known, held)
    ]
    shares = torch.nn.functional.one_hot(labels, len(task.labels)).float()
    means = (shares / shares.sum(0)).T @ pixels[0]
    nearest = torch.cdist(pixels[1], means).argmin(1)
    return [majority(task, labels, truth), ("nearest class mean", predicted_metrics(task, truth, nearest))]


def tag_baselines(task: Tagging, train: Any, held: Rows) -> list[Row]:
    """Return the metrics of the most frequent tag of each word, and of all words for an unknown word."""
    tags: dict[str, Counter[str]] = defaultdict(Counter)
    for row in train:
        for word, tag in zip(row["tokens"], row["tags"]):
            tags[word][tag] += 1
    usual = {word: counts.most_common(1)[0][0] for word, counts in tags.items()}
    most = sum(tags.values(), Counter[str]()).most_common(1)[0][0]
    predicted = [[usual.get(word, most) for word in row["tokens"]] for row in held]
    totals = [0.0] * task.sums
    for row, guess in zip(held, predicted):
        totals = [old + new for old, new in zip(totals, [0.0, *task.compared(row["tags"], guess)])]
    metrics = task.metrics(totals, {})
    return [("most frequent tag of each word", {name: v for name, v in metrics.items() if name != "loss"})]


def copy_baselines(task: Translation, train: Any, held: Rows) -> list[Row]:
    """Return BLEU of the sources as translations."""
    import sacrebleu

    sources, targets = ([row[name] for row in held] for name in ("source", "target"))
    return [("the source itself", {"bleu": sacrebleu.corpus_bleu(sources, [targets]).score})]


def lead_baselines(task: Summarization, train: Any, held: Rows) -> list[Row]:
    """Return ROUGE of the first three sentences of each source."""
    return [("first three sentences", rouge([lead(r["source"]) for r in held], [r["target"] for r in held]))]


def answer_baselines(task: QuestionAnswering, train: Any, held: Rows) -> list[Row]:
    """Return the metrics of the part of a sentence, between commas, with most words of the question."""
    pairs = []
    for row in held:
        asked = set(_words(row["question"]))
        parts = [part for part in re.split(r"[.,;:!?\n]\s", row["context"]) if part.strip()] or [""]
        pairs.append((max(parts, key=lambda part: len(asked & set(_words(part)))), row["answers"]["text"]))
    scores = {"exact_match": exact_match, "f1": f1}
    return [
        (
            "most words of the question",
            {name: 100 * float(np.mean([score(*pair) for pair in pairs])) for name, score in scores.items()},
        )
    ]


METHODS: tuple[tuple[type[Task], Callable[[Any, Any, Rows], list[Row]]], ...] = (
    (LanguageModelling, text_baselines),
    (ImageModelling, pixel_baselines),
    (ImageClassification, image_label_baselines),
    (Classification, label_baselines),
    (Tagging, tag_baselines),
    (Translation, copy_baselines),
    (Summarization, lead_baselines),
    (QuestionAnswering, answer_baselines),
)


def label_ids(task: SingleLabelTask, rows: Iterable[dict[str, Any]]) -> Tensor:
    """Return the number of the label of each row."""
    return torch.tensor([task.label_id(str(row["label"])) for row in rows])


def majority(task: SingleLabelTask, labels: Tensor, truth: Tensor) -> Row:
    """Return the metrics of always predicting the most frequent of the training `labels`."""
    most = torch.bincount(labels, minlength=len(task.labels)).argmax()
    return "most frequent label", predicted_metrics(task, truth, most.expand(len(truth)))


def predicted_metrics(task: SingleLabelTask, truth: Tensor, predicted: Tensor) -> dict[str, float]:
    """Return the metrics of a task for predicted labels, without those that need probabilities."""
    count = len(task.labels)
    confusion = torch.bincount(truth * count + predicted, minlength=count**2)
    metrics = task.metrics([0.0, *map(float, confusion)], {})
    return {name: value for name, value in metrics.items() if name not in ("loss", "majority")}


def logistic_regression(features: Tensor, labels: Tensor, classes: int) -> Callable[[Tensor], Tensor]:
    """Return a function from features to labels, fitted by L-BFGS with an L2 penalty.

    The sum of the losses plus half of the squared weights is minimized, as scikit-learn does by default.
    """
    weight = torch.zeros(features.shape[1], classes, requires_grad=True)
    bias = torch.zeros(classes, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        logits = torch.sparse.mm(features, weight) + bias
        loss = torch.nn.functional.cross_entropy(logits, labels) + weight.square().sum() / 2 / len(labels)
        loss.backward()
        return loss

    optimizer.step(closure)
    return lambda rows: (torch.sparse.mm(rows, weight.detach()) + bias.detach()).argmax(1)


def _words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def _bag(row: dict[str, Any], columns: Sequence[str]) -> Counter[tuple[int, str]]:
    """Return the number of occurrences of each word, separately for each text of a pair."""
    return Counter((i, word) for i, column in enumerate(columns) for word in _words(row[column]))


def _counts(bags: Sequence[Counter[tuple[int, str]]], vocabulary: dict[tuple[int, str], int]) -> Tensor:
    """Return a sparse tensor [rows, words] of counts."""
    cells = [(i, vocabulary[w], n) for i, bag in enumerate(bags) for w, n in bag.items() if w in vocabulary]
    rows, words, numbers = zip(*cells) if cells else ((), (), ())
    size = (len(bags), max(1, len(vocabulary)))
    places, values = torch.tensor([rows, words]).long(), torch.tensor(numbers).float()
    return torch.sparse_coo_tensor(places, values, size, check_invariants=True)


def _common_words(rows: Rows) -> Tensor:
    """Return a sparse tensor [rows, 1] with the share of the words of a pair that both texts have."""
    pairs = [(set(_words(row["text"])), set(_words(row["pair"]))) for row in rows]
    return torch.tensor([[len(a & b) / max(1, len(a | b))] for a, b in pairs]).to_sparse()
