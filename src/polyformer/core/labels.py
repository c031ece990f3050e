"""Labels: what should be predicted, and -100 where nothing should."""

import torch
from torch import Tensor

from polyformer.core.errors import InputError

IGNORED = -100
"""Label of a token that is not predicted."""


def check_labels(labels: Tensor, shape: torch.Size, classes: int) -> None:
    """Raises `InputError` unless labels have `shape` and, looked at on the CPU only, fit the classes."""
    if labels.shape != shape:
        raise InputError(f"labels: expected the shape {tuple(shape)}, got {tuple(labels.shape)}")
    if labels.dtype not in (torch.int64, torch.int32):
        raise InputError(f"labels: expected integers, got {labels.dtype}")
    if labels.device.type != "cpu" or torch.compiler.is_compiling() or not labels.numel():
        return
    low, high = (int(bound) for bound in labels.masked_fill(labels == IGNORED, 0).aminmax())
    if low < 0 or high >= classes:
        raise InputError(f"labels: expected numbers from 0 to {classes - 1}, or -100, got {low} to {high}")


def next_labels(labels: Tensor, document_ids: Tensor | None, valid: Tensor | None = None) -> Tensor:
    """labels [B, T] moved one to the left: what each token should predict; -100 where a document ends.

    Padding, False in `valid` [B, T], predicts nothing and is predicted by nothing.
    """
    if valid is not None:
        labels = labels.masked_fill(~valid, IGNORED)
    moved = torch.full_like(labels, IGNORED)
    moved[:, :-1] = labels[:, 1:]
    if document_ids is not None:
        moved[:, :-1] = moved[:, :-1].masked_fill(document_ids[:, 1:] != document_ids[:, :-1], IGNORED)
    return moved if valid is None else moved.masked_fill(~valid, IGNORED)
