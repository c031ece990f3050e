"""Results of a finished run: a table, a text sample, completed images, and what simpler methods reach.

The baselines are measured on the same held-out rows, for every kind of task, and learn from the training rows
only.

    language model     uniform distribution, n-gram model
    model of pixels    uniform distribution, each pixel by itself
    texts with labels  most frequent label, logistic regression on a bag of words
    pairs with labels  the same, and logistic regression on the share of common words
    images with labels most frequent label, nearest mean of a class
    tags               most frequent tag of each word
    translation        the source itself; for summaries its first sentences
    answers            the part of the context that shares most words with the question

The n-gram model is interpolated Kneser-Ney:

    P_k(w | c) = (max(N(c w) - D, 0) + D * kinds(c) * P_{k-1}(w | c')) / N(c)

c: the k - 1 tokens before w; c': c without its first token; N: counts; kinds(c): the number of different
tokens after c; P_0 = 1 / V. At the highest order N counts occurrences; at lower orders it counts the
different contexts of an n-gram (or occurrences, for n-grams at the start of a document, which have only one
context). D = n1 / (n1 + 2 n2), by order, where n1 and n2 n-grams have N of 1 and 2. After an unseen context,
P_k = P_{k-1}. Kneser and Ney 1995; Chen and Goodman 1999, section 2.7 and equation 16.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.core.host_values import IGNORED
from polyformer.core.measuring import new_figure, save_figure
from polyformer.data import Splits
from polyformer.data.formats.published import exact_match, f1, lead, rouge
from polyformer.models.architectures import Transformer
from polyformer.models.generation import GenerationConfig, SamplingConfig
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
from polyformer.training.tasks.text import text_metrics

Row = tuple[str, dict[str, float]]


def sample(task: LanguageModelling, model: Transformer, seed: int, max_new_tokens: int = 160) -> str:
    """Return the prompt of the task and a sampled continuation, deterministic for a seed."""
    prompt = task.config.prompt
    budget = model.config.max_position_embeddings - len(task.start(prompt))
    drawing = SamplingConfig(do_sample=True, temperature=0.7, top_p=0.95, seed=seed)
    config = GenerationConfig(max_new_tokens=max(1, min(max_new_tokens, budget)), sampling=drawing)
    return prompt + task.generate(model, prompt, config)[0]


def table(rows: list[Row]) -> str:
    """Format rows of metrics as aligned text."""
    names = list(dict.fromkeys(name for _, metrics in rows for name in metrics))
    first = max(len(title) for title, _ in rows)
    lines = [" " * first + "".join(f"  {name.replace('_', ' '):>10}" for name in names)]
    for title, metrics in rows:
        cells = (
            f"{number(metrics[name]) if name in metrics else '':>{max(10, len(name))}}" for name in names
        )
        lines.append(f"{title:<{first}}  {'  '.join(cells)}")
    return "\n".join(lines)


def number(value: float) -> str:
    """Format a metric with four digits."""
    return f"{value:,.0f}" if value >= 10_000 else f"{value:.4g}"


IMAGES = 10
GAP = 1  # pixels between images


def write_sheet(path: Path, task: ImageModelling, model: Transformer, splits: Splits, seed: int) -> None:
    """Draw the first held-out images, what the model reads of them, and what it generates, into `path`.

    They are named rows of pictures; negative levels are blank. Raises `InputError` if matplotlib is not
    installed.
    """
    held = next(rows for rows in (splits.test, splits.validation, splits.train) if rows is not None)
    images = dict(zip(task.pictures, task.complete(model, held, IMAGES, seed)))
    rows, (number, height, width) = len(images), next(iter(images.values())).shape[:3]
    paper = np.ones((rows * (height + GAP) - GAP, number * (width + GAP) - GAP, 3))
    for row, pictures in enumerate(images.values()):
        for column, picture in enumerate(pictures):
            top, left = row * (height + GAP), column * (width + GAP)
            light = np.where(picture < 0, 1, picture / (task.levels - 1)).reshape(height, width, -1)
            paper[top : top + height, left : left + width] = light
    figure = new_figure(1 + number, len(images) + 1)
    axis = figure.subplots()
    axis.imshow(paper)
    centres = [row * (height + GAP) + (height - 1) / 2 for row in range(rows)]
    axis.set_yticks(centres, list(images))
    axis.set_xticks([])
    axis.spines[:].set_visible(False)
    save_figure(figure, path)


Gram = tuple[int, ...]


class NGram:
    """An n-gram model of token ids; each document starts with <bos>, which is never predicted."""

    def __init__(self, documents: Iterable[Sequence[int]], order: int, vocab_size: int):
        if order < 1:
            raise InputError(f"order: expected 1 or more, got {order}")
        self.order, self.vocab_size = order, vocab_size
        self.tables = [_Table(counts) for counts in _ngram_counts(documents, order)]

    def probability(self, token: int, before: Sequence[int]) -> float:
        """Return P(token | before); `before`: all tokens before it in its document."""
        probability = 1 / self.vocab_size
        for k, table in enumerate(self.tables):
            if k > len(before):
                break
            context = tuple(before[len(before) - k :])
            total = table.totals.get(context)
            if total is None:
                break
            count = table.counts.get((*context, token), 0)
            left = table.discount * table.kinds[context]
            probability = (max(count - table.discount, 0.0) + left * probability) / total
        return probability

    def nats(self, documents: Iterable[Sequence[int]]) -> tuple[float, int]:
        """Return the sum of -ln P over all tokens of `documents` except <bos>, and their number."""
        nats, tokens = 0.0, 0
        for document in documents:
            for place in range(1, len(document)):
                before = document[max(0, place - self.order + 1) : place]
                nats -= math.log(self.probability(document[place], before))
            tokens += max(0, len(document) - 1)
        return nats, tokens


class _Table:
    """The n-grams of one order: counts, sums and kinds by context, and the discount."""

    def __init__(self, counts: dict[Gram, int]):
        self.counts = counts
        self.totals: dict[Gram, int] = defaultdict(int)
        self.kinds: dict[Gram, int] = defaultdict(int)
        for gram, count in counts.items():
            self.totals[gram[:-1]] += count
            self.kinds[gram[:-1]] += 1
        often = Counter(counts.values())
        # Without an n-gram of count 1 the formula gives 0, and unseen n-grams would be impossible.
        self.discount = often[1] / (often[1] + 2 * often[2]) if often[1] else 0.5


def _ngram_counts(documents: Iterable[Sequence[int]], order: int) -> list[dict[Gram, int]]:
    """Return N of the n-grams of orders 1 to `order`, in which <bos> is never the last token."""
    highest: Counter[Gram] = Counter()
    heads: list[Counter[Gram]] = [Counter() for _ in range(order)]  # n-grams that begin a document, by order
    for document in documents:
        highest.update(zip(*(document[i:] for i in range(order))) if order > 1 else zip(document[1:]))
        for k in range(2, min(order, len(document) + 1)):
            heads[k][tuple(document[:k])] += 1
    tables: list[dict[Gram, int]] = [highest]
    for k in range(order - 1, 0, -1):
        tables.insert(0, Counter(gram[1:] for gram in tables[0]) + heads[k])
    return tables


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
    documents, counts = task.rows.documents(held), task.rows.count(held)
    vocabulary = len(task.tokenizer)
    tokens = sum(len(document) - 1 for document in documents)
    rows = [("uniform", text_metrics(tokens * math.log(vocabulary), tokens, counts))]
    model = NGram(task.rows.documents(list(train)), order, vocabulary)
    return [*rows, (f"{order}-gram (Kneser-Ney)", text_metrics(*model.nats(documents), counts))]


def pixel_baselines(task: ImageModelling, train: Any, held: Rows) -> list[Row]:
    """Return the metrics of a uniform guess, and of the level frequencies of each pixel.

    The frequencies are smoothed by one count of every level, so that no level is impossible (Laplace).
    """
    labels = (np.stack([row["labels"] for row in task.rows.prepare(list(rows))]) for rows in (train, held))
    known, levels = (rows[:, rows[0] != IGNORED] for rows in labels)  # levels [images, pixels]
    place = np.arange(known.shape[1])
    counts = np.ones((known.shape[1], task.levels))
    for image in known:
        counts[place, image] += 1
    nats = -np.log(counts / counts.sum(1, keepdims=True))[place, levels].sum()
    even = levels.size * math.log(task.levels)
    return [
        (name, task.metrics.values([float(sum_), levels.size], {}))
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
    totals = [0.0] * task.metrics.sums
    for row, guess in zip(held, predicted):
        totals = [old + new for old, new in zip(totals, [0.0, *task.metrics.compared(row["tags"], guess)])]
    metrics = task.metrics.values(totals, {})
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
    return torch.tensor([task.metrics.labels.number_of_row(row) for row in rows])


def majority(task: SingleLabelTask, labels: Tensor, truth: Tensor) -> Row:
    """Return the metrics of always predicting the most frequent of the training `labels`."""
    most = torch.bincount(labels, minlength=len(task.labels)).argmax()
    return "most frequent label", predicted_metrics(task, truth, most.expand(len(truth)))


def predicted_metrics(task: SingleLabelTask, truth: Tensor, predicted: Tensor) -> dict[str, float]:
    """Return the metrics of a task for predicted labels, without those that need probabilities."""
    count = len(task.labels)
    confusion = torch.bincount(truth * count + predicted, minlength=count**2)
    metrics = task.metrics.values([0.0, *map(float, confusion)], {})
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
