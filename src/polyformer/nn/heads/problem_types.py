"""What the labels of a text are, one class, several, or numbers, and the loss of each.

| problem      | labels                          | loss, the mean over                                   |
|--------------|---------------------------------|-------------------------------------------------------|
| single_label | [...] classes, -100 for none    | labelled items, of -log softmax(logits)[label]        |
| multi_label  | [..., n], 1 for each that holds | items and labels, of the binary cross-entropy         |
| regression   | [..., n] numbers, or [...] of 1 | items and numbers, of (logit - label)^2               |
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.core.errors import InputError, quote
from polyformer.core.host_values import bounds, check_labels

Problem = Literal["single_label", "multi_label", "regression"]


def label_loss(problem: str | None, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of logits [..., n]. Without a `problem`, a single logit is a number, and floating-point
    labels are for several labels that can hold at once."""
    if problem is None:
        problem_of_floats = "multi_label" if labels.is_floating_point() else "single_label"
        problem = "regression" if logits.shape[-1] == 1 else problem_of_floats
    if problem == "single_label":
        return mean_cross_entropy(logits, labels)
    # Labels [...] of a single number become [..., 1], as the logits.
    if logits.shape[-1] == 1 and labels.shape == logits.shape[:-1]:
        labels = labels.unsqueeze(-1)
    if labels.shape != logits.shape:
        raise InputError(
            f"labels: expected the shape {tuple(logits.shape)} of a problem {quote(problem)}, "
            f"got {tuple(labels.shape)}"
        )
    targets = labels.to(logits.dtype)
    if problem == "regression":
        return F.mse_loss(logits, targets)
    _check_binary_labels(labels)
    return F.binary_cross_entropy_with_logits(logits, targets)


def mean_cross_entropy(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Return the mean over the labels that are not -100, 0 if there is none; logits [..., classes]."""
    check_labels(labels, logits.shape[:-1], logits.shape[-1])
    rows, places = logits.flatten(0, -2), labels.flatten()
    total = F.cross_entropy(rows, places, reduction="sum", label_smoothing=smoothing)
    return total / (labels != -100).sum().clamp_min(1)


def random_labels(problem: str | None, rows: int, num_labels: int) -> Tensor:
    """Return labels for texts: classes [rows], or ones and zeros or numbers [rows, num_labels]."""
    if problem == "multi_label":
        return torch.randint(2, (rows, num_labels))
    if problem == "regression" or (problem is None and num_labels == 1):
        return torch.randn(rows, num_labels)
    return torch.randint(num_labels, (rows,))


def _check_binary_labels(labels: Tensor) -> None:
    """Raise `InputError` for labels outside [0, 1], if the host knows their values."""
    if (known := bounds(labels)) is None:
        return
    low, high = known
    if low < 0 or high > 1:
        raise InputError(f"labels: expected 0 or 1 for each of several labels, got {low:g} to {high:g}")
