"""What the last feed-forward of a stack reads, for who wants to see it: the keys of a datastore."""

import threading
from typing import Self

from torch import Tensor, nn

from polyformer.stack.stack import Stack


class LastFeedForwardInput:
    """Inside `with`, `value` [B, T, E] is what the last feed-forward read in the last pass of this thread.

    It comes after the norm where a block has one before its sub-layers, and is the layer's own state where it
    has not.
    """

    def __init__(self, stack: Stack):
        self.module: nn.Module = stack.sequence[-1].feedforward
        self.thread = 0
        self.seen: Tensor | None = None

    def __enter__(self) -> Self:
        self.thread = threading.get_ident()
        self.hook = self.module.register_forward_pre_hook(self._see)
        return self

    def __exit__(self, *error: object) -> None:
        self.hook.remove()
        self.seen = None

    @property
    def value(self) -> Tensor:
        """Of the last pass."""
        assert self.seen is not None, "a pass comes first"
        return self.seen

    def _see(self, module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        if threading.get_ident() == self.thread:  # others may run the same model
            self.seen = arguments[0]
