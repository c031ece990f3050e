"""What every head has in common: hidden states in, a loss or predictions out."""

import dataclasses
from collections.abc import Callable

from torch import Tensor, nn

from polyformer.core.config import Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadConfig(Config):
    """Family of heads: `build(hidden_size, vocab_size, tied)` makes the module."""

    def build(self, hidden_size: int, vocab_size: int, tied: bool) -> "Head":
        raise NotImplementedError

    def example_labels(self, rows: int, length: int, vocab_size: int) -> Tensor | None:
        """Random labels for texts [rows, length], for tests and measurements; None if it takes none."""
        return None


@dataclasses.dataclass(frozen=True, eq=False)
class HeadInput:
    """What a head may look at.

    hidden: [B, T, E], the last layer's output. mask: [B, T] bool, True for real tokens; None when all are.
    table: [V, E], the token vectors, for heads that share them.
    """

    hidden: Tensor
    mask: Tensor | None
    table: Tensor


class Head(nn.Module):
    """Predictions, and the loss when there are labels."""

    predicts_next = False  # whether a decoder's labels are shifted by one before they reach this head

    def forward(self, inputs: HeadInput, labels: Tensor | None) -> tuple[Tensor | None, Callable[[], Tensor]]:
        """The mean loss over labelled items (None without labels) and what makes the predictions."""
        raise NotImplementedError
