"""Images for the rows of the table that need two dimensions: 14 x 14 pixels in eight levels, a token each."""

import itertools
from pathlib import Path

import torch
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.data.formats.images import IMAGE, read_idx
from polyformer_lab.members.questions import Rows

LEVELS, SIDE, SHRUNK = 8, 14, 2
KINDS = ("pixel",)


def pixels(file: str, images: int) -> Tensor:
    """Return the first images of an IDX file of 28 x 28 pixels, [N, 196]: means of 2 x 2 pixels as levels."""
    rows = list(itertools.islice(read_idx(Path(file)), images))
    size = SIDE * SHRUNK
    if any((row["height"], row["width"]) != (size, size) for row in rows):
        raise InputError(f"images: expected images of {size} x {size} pixels in {file}, such as MNIST's")
    whole = torch.stack([torch.frombuffer(bytearray(row[IMAGE]), dtype=torch.uint8) for row in rows])
    small = whole.view(-1, SIDE, SHRUNK, SIDE, SHRUNK).float().mean((2, 4))
    return (small * LEVELS / 256).long().flatten(1)


def as_rows(ids: Tensor) -> Rows:
    """Return rows in which the answer of every pixel [B, T] is the next pixel."""
    ahead = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], 1)
    return Rows({"input_ids": ids}, ahead, torch.zeros_like(ids), KINDS)
