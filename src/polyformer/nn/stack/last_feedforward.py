"""Access to the input of a stack's last feed-forward, for example for the keys of a datastore."""

import threading
from typing import Self

from torch import Tensor, nn

from polyformer.nn.stack.stack import Stack


class LastFeedForwardInput:
    """The last feed-forward's input `value` [B, T, E] in this thread's last pass inside `with`.

    It is the normed input if the block has a norm before its sub-layers, and otherwise the layer's state.
    """

    def __init__(self, stack: Stack):
        self.module: nn.Module = stack.sequence[-1].feedforward
        self.thread = 0
        self.recorded: Tensor | None = None

    def __enter__(self) -> Self:
        self.thread = threading.get_ident()
        self.hook = self.module.register_forward_pre_hook(self._record)
        return self

    def __exit__(self, *error: object) -> None:
        self.hook.remove()
        self.recorded = None

    @property
    def value(self) -> Tensor:
        """Return the input in the last pass."""
        assert self.recorded is not None, "a pass comes first"
        return self.recorded

    def _record(self, module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        if threading.get_ident() == self.thread:  # other threads may run the same model
            self.recorded = arguments[0]
