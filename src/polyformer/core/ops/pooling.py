"""Pooling of a sequence to one vector: the first or last real token, or the mean or maximum of all."""

from typing import Literal

import torch
from torch import Tensor

from polyformer.core.errors import InputError

Pooling = Literal["first", "last", "mean", "max"]
"""The type of an option that names a pooling."""


def pool(hidden: Tensor, mask: Tensor | None, how: str) -> Tensor:
    """Return hidden [B, T, E] pooled to [B, E]; T >= 1, `mask` [B, T] is True for real tokens."""
    if not hidden.shape[1]:
        raise InputError("input_ids: pooling needs at least 1 token per text, got none")
    if mask is None:
        wholes = {"first": lambda: hidden[:, 0], "last": lambda: hidden[:, -1], "max": lambda: hidden.amax(1)}
        return wholes.get(how, lambda: hidden.mean(1))()
    if how == "max":  # zeros for a text without real tokens, as for the mean
        most = hidden.masked_fill(~mask.unsqueeze(2), -torch.inf).amax(1)
        return most.masked_fill(~mask.any(1, keepdim=True), 0.0)
    if how == "mean":
        weight = mask.to(hidden.dtype)
        return torch.einsum("bte,bt->be", hidden, weight) / weight.sum(1, keepdim=True).clamp_min(1)
    order = torch.arange(mask.shape[1], device=mask.device)
    first = torch.where(mask, order, mask.shape[1]).amin(1)
    index = first if how == "first" else torch.where(mask, order, -1).amax(1)
    # A text without real tokens has none of the two: any token serves.
    index = index.clamp(0, mask.shape[1] - 1)
    # A graph keeps the number of rows variable in `shape`, and not in `len`.
    return hidden[torch.arange(hidden.shape[0], device=hidden.device), index]


def without_first(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """Return which tokens [B, T] are real and not the first, or the only one of their text."""
    valid = hidden.new_ones(hidden.shape[:2], dtype=torch.bool) if mask is None else mask
    later = valid & (valid.cumsum(1) > 1)
    return torch.where(later.any(1, keepdim=True), later, valid)
