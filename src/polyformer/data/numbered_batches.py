"""Batches that contain only their numbers, for tasks that generate their own data."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from polyformer.data.batching import Batch, Position


@dataclass(frozen=True)
class NumberedBatches:
    """Numbered batches, `count` per epoch, each {"number": [[epoch, number in it]]}."""

    count: int

    def epoch(self, epoch: int, *, position: Sequence[int] = Position()) -> Iterator[tuple[Position, Batch]]:
        """Yield `(position after it, batch)` from `position` on, see `Batches.epoch`."""
        for number in range(Position(*position).batch, self.count):
            yield Position(0, number + 1), {"number": torch.tensor([[epoch, number]])}
