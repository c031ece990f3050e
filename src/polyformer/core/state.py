"""State: what one call leaves for the next (caches, memories, sums), passed in and returned, never hidden."""

import dataclasses
from collections.abc import Callable
from typing import Any, Self

from torch import Tensor


@dataclasses.dataclass(frozen=True)
class State:
    """Base of all states: a dataclass of tensors [B, ...], other states, tuples of them, and plain values."""

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """A copy with `function` applied to every tensor."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return dataclasses.replace(self, **{name: _map(value, function) for name, value in fields.items()})

    def reorder(self, index: Tensor) -> Self:
        """The state of batch rows `index` [B'], in that order: what beam search needs after every step."""
        return self.map(lambda tensor: tensor.index_select(0, index))

    def detach(self) -> Self:
        """The same values outside the graph, so that segments can be trained one after another."""
        return self.map(Tensor.detach)


def _map(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, State):
        return value.map(function)
    if isinstance(value, tuple):
        return tuple(_map(item, function) for item in value)
    return value
