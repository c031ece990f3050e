"""Sums over batches, and metrics computed from them. A loss is in nats (natural logarithm) per label."""

import math

import torch
from torch import Tensor

from polyformer.core.host_values import IGNORED
from polyformer.core.sequence.context_parallel import gather_sequence
from polyformer.models.outputs import ModelOutput


def exp(value: float) -> float:
    """Return e^value, or infinity if it exceeds the largest float."""
    return math.exp(value) if value < 700 else math.inf


def stacked(*numbers: Tensor | float, device: torch.device) -> Tensor:
    """Return `numbers` as one float64 vector."""
    return torch.stack([torch.as_tensor(number, dtype=torch.float64, device=device) for number in numbers])


def loss_total(loss: Tensor, count: int) -> Tensor:
    """Return (sum of the loss, count) of a mean `loss` over `count` labels."""
    return stacked(loss.double() * count, count, device=loss.device)


def perplexity_metrics(nats: float, count: float) -> dict[str, float]:
    """Return loss = nats / count and perplexity exp(loss)."""
    loss = nats / max(count, 1)
    return {"loss": loss, "perplexity": exp(loss)}


def most_likely(output: ModelOutput) -> Tensor:
    """Return the most probable class of every token, [..., T], gathered under context parallelism."""
    return gather_sequence(output.logits.argmax(-1), output.slots)


def prediction_totals(output: ModelOutput, labels: Tensor) -> Tensor:
    """Return (sum of the loss, correct predictions, labels) over labels [...] that are not `IGNORED`."""
    assert output.loss is not None
    count = (labels != IGNORED).sum()
    correct = (most_likely(output) == labels).sum()  # IGNORED is not a token, so it never matches
    return stacked(output.loss.double() * count, correct, count, device=labels.device)


def prediction_metrics(nats: float, correct: float, count: float) -> dict[str, float]:
    """Return loss, perplexity and accuracy = correct / count."""
    return {**perplexity_metrics(nats, count), "accuracy": correct / max(count, 1)}
