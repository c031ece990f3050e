"""Batches that are only their numbers: the data come of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from polyformer.data.batching import Batch, Position


@dataclass(frozen=True)
class Numbered:
    """`count` batches an epoch, each {"number": [[epoch, number in it]]}."""

    count: int

    def epoch(self, epoch: int, *, position: Sequence[int] = Position()) -> Iterator[tuple[Position, Batch]]:
        """`(position after it, batch)` from `position` on, as `Batches.epoch`."""
        for number in range(Position(*position).batch, self.count):
            yield Position(0, number + 1), {"number": torch.tensor([[epoch, number]])}
