"""Batches of any shape padded to microbatches of one shape, as required between pipeline stages."""

import torch
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.core.labels import IGNORED
from polyformer.training.distributed.pipeline_stages import LOSS_WEIGHT

Batch = dict[str, Tensor]
FILL = {"labels": IGNORED, "shift_labels": IGNORED}
"""Padding values other than 0."""


def same_shape(batches: list[Batch], shares: list[float]) -> Batch:
    """Return all batches concatenated [M B, T], each padded to the maximum number of rows and tokens.

    Padding belongs to no text (`attention_mask` 0) and has no label. `share` [M] contains the weight of the
    loss of each batch. The target entries of an encoder-decoder are padded to a separate length. Raises
    `InputError` for entries that are neither per token nor per text.
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
    return {**joined, LOSS_WEIGHT: torch.tensor(shares, dtype=torch.float64)}


def _differ(batches: list[Batch]) -> bool:
    return any(batch[name].shape != value.shape for batch in batches for name, value in batches[0].items())


def _with_masks(batch: Batch) -> Batch:
    masks = {"attention_mask": torch.ones_like(batch["input_ids"])}
    if "decoder_input_ids" in batch:
        masks["decoder_attention_mask"] = torch.ones_like(batch["decoder_input_ids"])
    return {**masks, **batch}


def _padded(value: Tensor, name: str, rows: int, length: int) -> Tensor:
    """Return the entry `name`, per token or per text, padded to `rows` and `length`."""
    fill = FILL.get(name, 0)
    if value.dim() == 2:
        missing = length - value.shape[1]
        if name == "document_ids":  # document ids must not decrease along a row
            value = torch.cat([value, value[:, -1:].expand(-1, missing)], 1)
        else:
            value = torch.nn.functional.pad(value, (0, missing), value=fill)
    return torch.cat([value, value.new_full((rows - len(value), *value.shape[1:]), fill)])
