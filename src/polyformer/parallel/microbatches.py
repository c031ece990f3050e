"""Batches of any shape as microbatches of one, which is what a pipeline's stages exchange."""

import torch
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.core.labels import IGNORED
from polyformer.parallel.stages import SHARE

Batch = dict[str, Tensor]
FILL = {"labels": IGNORED, "shift_labels": IGNORED}
"""What stands at padding, where it is not 0."""


def same_shape(batches: list[Batch], shares: list[float]) -> Batch:
    """All batches one after another [M B, T], each padded to the most rows and tokens of any.

    Padding belongs to no text (`attention_mask` 0) and has no label. `share` [M] holds by how much the loss
    of each batch counts.
    Raises `InputError` for entries that are neither of each token nor of each text.
    """
    rows, length = (max(batch["input_ids"].shape[axis] for batch in batches) for axis in (0, 1))
    padded = any(batch["input_ids"].shape != (rows, length) for batch in batches)
    whole = [_with_mask(batch) if padded else batch for batch in batches]
    names = whole[0].keys()
    if any(batch.keys() != names for batch in whole):
        raise InputError("pipeline: the batches of a step have different entries; set accumulate to 1")
    joined = {name: torch.cat([_padded(batch, name, rows, length) for batch in whole]) for name in names}
    return {**joined, SHARE: torch.tensor(shares, dtype=torch.float64)}


def _with_mask(batch: Batch) -> Batch:
    return {**batch, "attention_mask": batch.get("attention_mask", torch.ones_like(batch["input_ids"]))}


def _padded(batch: Batch, name: str, rows: int, length: int) -> Tensor:
    """The entry `name`, of each token or of each text, for so many rows and tokens."""
    value, fill = batch[name], FILL.get(name, 0)
    if value.dim() == 2 and value.shape == batch["input_ids"].shape:
        missing = length - value.shape[1]
        if name == "document_ids":  # whose numbers do not fall along a row
            value = torch.cat([value, value[:, -1:].expand(-1, missing)], 1)
        else:
            value = torch.nn.functional.pad(value, (0, missing), value=fill)
    elif value.dim() != 1:
        raise InputError(
            f"pipeline: expected entries [batch, length] or [batch], got {name} {tuple(value.shape)}"
        )
    return torch.cat([value, value.new_full((rows - len(value), *value.shape[1:]), fill)])
