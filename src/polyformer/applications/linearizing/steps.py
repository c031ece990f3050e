"""The steps of a short training on the rows of a text."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from polyformer.training.optimizers import Linear

SCHEDULE = Linear(warmup=10, floor=0.05)
"""The learning rate rises for ten steps and falls to a twentieth at the last."""

Show = Callable[[int, float], None]
"""A function called after every step with the number of tokens read and the loss."""


@dataclasses.dataclass(frozen=True)
class Steps:
    """Batches of `batch` rows in random order, again and again until `tokens` tokens have been read.

    rows: token ids, all of one length. precision: of `training.machine`, "no" for float32.
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

    def train(
        self, optimizer: torch.optim.Optimizer, backward: Callable[[Tensor], float], show: Show
    ) -> None:
        """Update the parameters of `optimizer` after each batch.

        backward: computes the gradients of a batch of token ids and returns its loss.
        """
        rates = LambdaLR(optimizer, lambda done: SCHEDULE.factor(done + 1, self.count))
        device = optimizer.param_groups[0]["params"][0].device
        for number, ids in enumerate(self.batches(device), 1):
            loss = backward(ids)
            optimizer.step()
            rates.step()
            optimizer.zero_grad()
            show(number * ids.numel(), loss)
