"""Regression: assign a number to a pair of texts, such as their similarity; measured by correlations.

The loss is the mean squared error. Cer et al. 2017 (STS-B); Devlin et al. 2019, section 4.1.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import nn

from polyformer.core.errors import InputError, quote
from polyformer.core.host_values import batch_to_device
from polyformer.core.imports import needs_extra
from polyformer.data.rows.batching import Batch, Row
from polyformer.nn.heads import ClassifyConfig, HeadConfig
from polyformer.training import share
from polyformer.training.tasks.base import SINGLE_PROCESS, HeldOut, Workers
from polyformer.training.tasks.text_rows import PairRows, TextRowsConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairRegressionConfig(TextRowsConfig):
    """Regression: assign a number to a pair of texts, such as their similarity."""

    needs: ClassVar[tuple[str, ...]] = ("text", "pair", "label")
    text_columns: ClassVar[tuple[str, ...]] = ("text", "pair")
    shortest: ClassVar[int] = 6
    kind: ClassVar[str] = "regress_pair"
    paper: ClassVar[str] = "Devlin et al. 2019, section 4.1 (STS-B)"


class PairRegression(PairRows, config=PairRegressionConfig):
    """Regression of a pair of texts, with metrics: loss (mean squared error), pearson and spearman."""

    config: PairRegressionConfig
    best = "pearson"
    direction = "max"
    head: HeadConfig = ClassifyConfig(num_labels=1, problem="regression")

    def fit_head(self, head: HeadConfig) -> HeadConfig:
        """Return the model's head with one number, if it classifies texts, else the head of the task."""
        if isinstance(head, ClassifyConfig):
            return dataclasses.replace(head, num_labels=1, problem="regression")
        return self.head

    def prepare(self, rows: Sequence[Row]) -> list[Row]:
        """Return the token ids and the number of each row."""
        numbers = [_number(row["label"]) for row in rows]
        return [{**row, "labels": number} for row, number in zip(self.encode_rows(rows), numbers)]

    @torch.no_grad()
    def measure(self, model: nn.Module, held: HeldOut, workers: Workers = SINGLE_PROCESS) -> dict[str, float]:
        """Return the metrics of the class; they need all predictions at once."""
        device = next(model.parameters()).device

        def predictions(batch: Batch) -> list[tuple[float, float]]:
            logits = model(**batch_to_device(batch, device)).logits
            return [*zip(logits.flatten().tolist(), batch["labels"].tolist())]

        batches = share((batch for _, batch in held.batches.epoch(0)), 0, workers.rank, workers.world)
        return correlations(workers.gather([*itertools.chain.from_iterable(map(predictions, batches))]))

    @torch.no_grad()
    def predict(self, model: nn.Module, texts: Sequence[str], pairs: Sequence[str]) -> list[float]:
        """Return the number of each text and its pair."""
        numbers = [0.0] * len(texts)
        rows = [{"text": text, "pair": pair} for text, pair in zip(texts, pairs, strict=True)]
        for places, logits in self.logits(model, rows):
            for place, number in zip(places, logits.flatten().tolist()):
                numbers[place] = number
        return numbers


def correlations(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Return loss, pearson and spearman of (prediction, label), by scipy; 0 for equal numbers on a side."""
    with needs_extra("metrics", "task regress_pair: correlations are computed by scipy"):
        from scipy.stats import pearsonr, spearmanr
    guesses, labels = np.array(pairs, np.float64).reshape(-1, 2).T
    metrics = {"loss": float(((guesses - labels) ** 2).mean()) if len(labels) else 0.0}
    varied = len({*guesses.tolist()}) > 1 and len({*labels.tolist()}) > 1
    for name, function in {"pearson": pearsonr, "spearman": spearmanr}.items():
        metrics[name] = float(function(guesses, labels).statistic) if varied else 0.0
    return metrics


def _number(label: object) -> float:
    """Return a label as a number; raise `InputError` for text."""
    try:
        number = float(str(label))
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise InputError(f"label: expected a finite number for each pair of texts, got {quote(label)}")
    return number
