"""Sums over batches, and the metrics they give. A loss is in nats (natural logarithm) a label."""

import math

import torch
from torch import Tensor

from polyformer.core.labels import IGNORED
from polyformer.outputs import ModelOutput
from polyformer.sequence.spread import whole_table


def exp(value: float) -> float:
    """e^value, infinite rather than an error where no float is large enough."""
    return math.exp(value) if value < 700 else math.inf


def stacked(*numbers: Tensor | float, device: torch.device) -> Tensor:
    """`numbers` as one float64 vector."""
    return torch.stack([torch.as_tensor(number, dtype=torch.float64, device=device) for number in numbers])


def loss_total(loss: Tensor, count: int) -> Tensor:
    """(sum of the loss, count) of a mean `loss` over `count` labels."""
    return stacked(loss.double() * count, count, device=loss.device)


def perplexity_metrics(nats: float, count: float) -> dict[str, float]:
    """loss = nats / count and perplexity exp(loss)."""
    loss = nats / max(count, 1)
    return {"loss": loss, "perplexity": exp(loss)}


def most_likely(output: ModelOutput) -> Tensor:
    """The class of largest logit at every token, [..., T]: of whole texts also where processes share them."""
    return whole_table(output.logits.argmax(-1), output.slots)


def prediction_totals(output: ModelOutput, labels: Tensor) -> Tensor:
    """(sum of the loss, correct predictions, labels) over labels [...] that are not `IGNORED`."""
    assert output.loss is not None
    count = (labels != IGNORED).sum()
    correct = (most_likely(output) == labels).sum()  # never at IGNORED, which is no token
    return stacked(output.loss.double() * count, correct, count, device=labels.device)


def prediction_metrics(nats: float, correct: float, count: float) -> dict[str, float]:
    """loss, perplexity and accuracy = correct / count."""
    return {**perplexity_metrics(nats, count), "accuracy": correct / max(count, 1)}
