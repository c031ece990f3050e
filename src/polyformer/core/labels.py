"""Labels: the targets of predictions, and -100 for no target."""

import torch
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.core.host_values import bounds, host_values, remember

IGNORED = -100
"""Label of a token without a target."""


def check_labels(labels: Tensor, shape: torch.Size, classes: int) -> None:
    """Raise `InputError` unless labels have `shape` and are integers in range, see `check_range`."""
    if labels.shape != shape:
        raise InputError(f"labels: expected the shape {tuple(shape)}, got {tuple(labels.shape)}")
    if labels.dtype not in (torch.int64, torch.int32):
        raise InputError(f"labels: expected integers, got {labels.dtype}")
    check_range(labels, classes)


def check_range(labels: Tensor, classes: int) -> None:
    """Raise `InputError` unless labels are class numbers or -100; only values in `host_values` are read."""
    values = host_values(labels)
    known = None if values is None else bounds(values.masked_fill(values == IGNORED, 0))
    if known is None:
        return
    low, high = known
    if low < 0 or high >= classes:
        raise InputError(f"labels: expected numbers from 0 to {classes - 1}, or -100, got {low} to {high}")


def next_labels(labels: Tensor, document_ids: Tensor | None, valid: Tensor | None = None) -> Tensor:
    """Return labels [B, T] shifted to the left by 1: the target of each token; -100 at the end of a document.

    Padding, False in `valid` [B, T], has no target and is no target. `host_values` of the arguments give
    `host_values` of the result.
    """
    following = _next_labels(labels, document_ids, valid)
    if following.device.type == "cpu":
        return following
    numbers = host_values(labels)
    documents, real = (None if x is None else host_values(x) for x in (document_ids, valid))
    if numbers is None or (documents is None, real is None) != (document_ids is None, valid is None):
        return following
    return remember(following, _next_labels(numbers, documents, real))


def _next_labels(labels: Tensor, document_ids: Tensor | None, valid: Tensor | None) -> Tensor:
    if valid is not None:
        labels = labels.masked_fill(~valid, IGNORED)
    moved = torch.full_like(labels, IGNORED)
    moved[:, :-1] = labels[:, 1:]
    if document_ids is not None:
        moved[:, :-1] = moved[:, :-1].masked_fill(document_ids[:, 1:] != document_ids[:, :-1], IGNORED)
    return moved if valid is None else moved.masked_fill(~valid, IGNORED)
