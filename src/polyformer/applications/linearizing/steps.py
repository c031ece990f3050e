"""The steps of a short training on the rows of a text."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

WARMUP = 10
"""Steps until the full learning rate."""

LAST = 0.05
"""The share of the learning rate that is left at the last step."""

Show = Callable[[int, float], None]
"""A function called after every step with the number of tokens read and the loss."""


@dataclasses.dataclass(frozen=True)
class Steps:
    """Batches of `batch` rows in random order, again and again until `tokens` tokens have been read.

    rows: token ids, all of one length. precision: of `training.precision`, "no" for float32.
    """

    rows: Sequence[Sequence[int]]
    tokens: int
    batch: int = 4
    seed: int = 0
    precision: str = "no"

    @property
    def count(self) -> int:
        """Return the number of steps."""
        return max(1, self.tokens // (self.batch * len(self.rows[0])))

    def batches(self, device: torch.device) -> Iterator[Tensor]:
        """Yield the token ids [B, T] of every step."""
        table = torch.tensor(self.rows, device=device)
        generator = torch.Generator().manual_seed(self.seed)
        order = torch.empty(0, dtype=torch.long)
        for _ in range(self.count):
            while len(order) < self.batch:
                order = torch.cat([order, torch.randperm(len(table), generator=generator)])
            yield table[order[: self.batch].to(device)]
            order = order[self.batch :]


class LinearSchedule:
    """An optimizer with a learning rate that rises for `WARMUP` steps and falls to `LAST` of its value."""

    def __init__(self, optimizer: torch.optim.Optimizer, count: int):
        self.optimizer, self.count, self.done = optimizer, count, 0
        self.rates = [group["lr"] for group in optimizer.param_groups]

    def step(self) -> None:
        """Apply the gradients and set them to None."""
        share = min(1.0, (self.done + 1) / WARMUP) * max(LAST, 1 - self.done / self.count)
        for group, rate in zip(self.optimizer.param_groups, self.rates):
            group["lr"] = rate * share
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1
