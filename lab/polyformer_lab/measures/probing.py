"""Probes of a frozen encoder: logistic regression on the mean of a layer's outputs over a text.

Layer and regularization are chosen on every tenth training text, for every encoder alike; the test texts are
not used for any choice.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polyformer.models.architectures import Transformer
from polyformer.models.checkpoints import config_of
from polyformer.training.recipes import Run
from polyformer.training.tasks import TextTask
from polyformer_lab.cells import Cell, Row, measurement
from polyformer_lab.measures.labelled import TEST, TRAIN, Labelled, read_texts, sklearn
from polyformer_lab.measures.operations import operations
from polyformer_lab.measures.scores import scores

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
    for chosen, batch in task.batched(model, rows):
        states = model(**batch, output_hidden_states=True).hidden_states
        mask = batch["attention_mask"].unsqueeze(-1)
        means = torch.stack([(state * mask).sum(1) / mask.sum(1) for state in states], 1).cpu().numpy()
        for row, mean in zip(chosen, means):
            features[row] = mean
    return np.stack(features, 1)
