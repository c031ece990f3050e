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
    of each batch counts. The entries of an encoder-decoder's target have a length of their own.
    Raises `InputError` for entries that are neither of each token nor of each text.
    """
    rows = max(len(batch["input_ids"]) for batch in batches)
    masked = [_with_masks(batch) for batch in batches] if _differ(batches) else batches
    names = masked[0].keys()
    if any(batch.keys() != names for batch in masked):
        raise InputError("pipeline: the batches of a step have different entries; set accumulate to 1")
    joined = {}
    for name in names:
        values = [batch[name] for batch in masked]
        if any(value.dim() > 2 for value in values):
            shape = tuple(values[0].shape)
            raise InputError(f"pipeline: expected entries [batch, length] or [batch], got {name} {shape}")
        length = max(value.shape[-1] for value in values)
        joined[name] = torch.cat([_padded(value, name, rows, length) for value in values])
    return {**joined, SHARE: torch.tensor(shares, dtype=torch.float64)}


def _differ(batches: list[Batch]) -> bool:
    return any(batch[name].shape != value.shape for batch in batches for name, value in batches[0].items())


def _with_masks(batch: Batch) -> Batch:
    masks = {"attention_mask": torch.ones_like(batch["input_ids"])}
    if "decoder_input_ids" in batch:
        masks["decoder_attention_mask"] = torch.ones_like(batch["decoder_input_ids"])
    return {**masks, **batch}


def _padded(value: Tensor, name: str, rows: int, length: int) -> Tensor:
    """The entry `name`, of each token or of each text, for so many rows and tokens."""
    fill = FILL.get(name, 0)
    if value.dim() == 2:
        missing = length - value.shape[1]
        if name == "document_ids":  # whose numbers do not fall along a row
            value = torch.cat([value, value[:, -1:].expand(-1, missing)], 1)
        else:
            value = torch.nn.functional.pad(value, (0, missing), value=fill)
    return torch.cat([value, value.new_full((rows - len(value), *value.shape[1:]), fill)])
