"""One vector for a sequence: the first token's, the last real token's, or the mean of the real ones."""

import torch
from torch import Tensor

from polyformer.core.errors import unknown

POOLINGS = ("first", "last", "mean")


def check_pooling(name: str) -> None:
    """Raises `InputError` unless `name` is a pooling."""
    if name not in POOLINGS:
        raise unknown("pooling", name, POOLINGS)


def pool(hidden: Tensor, mask: Tensor | None, how: str) -> Tensor:
    """[B, T, E] to [B, E]; `mask` [B, T] is True for real tokens (None: all are)."""
    if mask is None:
        return {"first": hidden[:, 0], "last": hidden[:, -1]}.get(how, hidden.mean(1))
    if how == "mean":
        weight = mask.to(hidden.dtype)
        return torch.einsum("bte,bt->be", hidden, weight) / weight.sum(1, keepdim=True).clamp_min(1)
    order = torch.arange(mask.shape[1], device=mask.device)
    index = (
        torch.where(mask, order, mask.shape[1]).amin(1)
        if how == "first"
        else torch.where(mask, order, -1).amax(1)
    )
    index = index.clamp(0, mask.shape[1] - 1)
    return hidden[torch.arange(len(hidden), device=hidden.device), index]
