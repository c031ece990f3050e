"""Checkpoint averaging: the mean of the weights of several checkpoints, as for the first Transformer."""

from collections.abc import Sequence
from pathlib import Path

import torch

from polyformer.core.errors import InputError, quote
from polyformer.core.files import read_tensors


def average_weights(files: Sequence[Path]) -> dict[str, torch.Tensor]:
    """Return the mean over `files` (safetensors) of each tensor, summed in float64, in its stored dtype.

    Integer and boolean tensors are counters and masks, not weights: they are taken from the last file.
    Vaswani et al. 2017, section 6.1: the last 5 checkpoints for base models, the last 20 for big models.
    """
    if not files:
        raise InputError("averaging: expected one checkpoint or more, got none")
    sums: dict[str, torch.Tensor] = {}
    last: dict[str, torch.Tensor] = {}
    for file in files:
        last = read_tensors(file)
        if sums:
            _check_alike(files[0], sums, file, last)
        for name, tensor in last.items():
            if not tensor.is_floating_point():
                sums[name] = tensor
            elif name in sums:
                sums[name] += tensor
            else:
                sums[name] = tensor.to(torch.float64, copy=True)
    return {
        name: (sums[name] / len(files)).to(tensor.dtype) if tensor.is_floating_point() else tensor.clone()
        for name, tensor in last.items()
    }


def _check_alike(
    file: Path, tensors: dict[str, torch.Tensor], other: Path, other_tensors: dict[str, torch.Tensor]
) -> None:
    """Raise `InputError` unless both files contain tensors with the same names and shapes."""
    strange = sorted(tensors.keys() ^ other_tensors.keys()) or [
        name for name in tensors if tensors[name].shape != other_tensors[name].shape
    ]
    if strange:
        raise InputError(
            f"averaging: {file} and {other} are not of the same model: they differ in {quote(strange[0])}"
        )
