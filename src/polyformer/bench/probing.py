"""What a frozen encoder knows of its texts: logistic regression on the mean of a layer's outputs over a text.

Layer and regularization are those that are best on every tenth training text, for every encoder alike; the
test texts choose nothing.
"""

import dataclasses
import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from polyformer.bench.labelled_texts import Texts
from polyformer.core.errors import InputError
from polyformer.model import Transformer
from polyformer.tasks import TextTask

INVERSE_WEIGHTS = (0.01, 0.1, 1.0)
"""C of the logistic regression, of which the best on the texts set aside is taken."""

ASIDE = 10
"""Every so many-th training text chooses layer and regularization."""


@dataclasses.dataclass(frozen=True)
class Probe:
    """What is read off a frozen encoder."""

    accuracy: float  # on the test texts, of the chosen layer
    layer: int  # 0 is the embedding
    last: float  # the same of the last layer


def probe(task: TextTask, model: Transformer, texts: Texts) -> Probe:
    """The best of logistic regressions on each layer's mean outputs, chosen without the test sentences."""
    train, test = (features(task, model, [text for text, _ in part]) for part in (texts.train, texts.test))
    labels, wanted = (np.array([label for _, label in part]) for part in (texts.train, texts.test))
    aside = np.arange(len(labels)) % ASIDE == 0
    tried = []
    for layer in range(len(train)):
        x = train[layer]
        for inverse_weight in INVERSE_WEIGHTS:
            chosen = _regression(x[~aside], labels[~aside], inverse_weight).score(x[aside], labels[aside])
            tried.append((chosen, layer, inverse_weight))
    accuracy = {}
    for layers in (range(len(train)), range(len(train) - 1, len(train))):
        _, layer, inverse_weight = max(trial for trial in tried if trial[1] in layers)
        accuracy[layer] = _regression(train[layer], labels, inverse_weight).score(test[layer], wanted)
    best = max(tried)[1]
    return Probe(float(accuracy[best]), best, float(accuracy[len(train) - 1]))


def _regression(x: np.ndarray, labels: np.ndarray, inverse_weight: float) -> Any:
    try:
        linear = importlib.import_module("sklearn.linear_model")
        scaling = importlib.import_module("sklearn.preprocessing")
        pipeline = importlib.import_module("sklearn.pipeline")
    except ImportError as error:
        raise InputError(
            "the probe is scikit-learn's, which is not installed; pip install 'polyformer[image]'"
        ) from error
    return pipeline.make_pipeline(
        scaling.StandardScaler(), linear.LogisticRegression(C=inverse_weight, max_iter=1000)
    ).fit(x, labels)


@torch.no_grad()
def features(task: TextTask, model: Transformer, texts: Sequence[str]) -> np.ndarray:
    """[layers + 1, texts, E]: the mean over a text's tokens of the embedding and of every layer's output."""
    cls, sep = task.tokenizer.cls_id, task.tokenizer.sep_id
    assert cls is not None
    assert sep is not None
    limit = model.config.max_position_embeddings
    rows = [[cls, *ids[: limit - 2], sep] for ids in task.tokenizer.encode_batch(list(texts))]
    features: list[np.ndarray] = [np.empty(0)] * len(rows)
    for chosen, batch in task.batched(model, rows):
        states = model(**batch, output_hidden_states=True).hidden_states
        mask = batch["attention_mask"].unsqueeze(-1)
        means = torch.stack([(state * mask).sum(1) / mask.sum(1) for state in states], 1).cpu().numpy()
        for row, mean in zip(chosen, means):
            features[row] = mean
    return np.stack(features, 1)
