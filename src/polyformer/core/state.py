"""States: what one call leaves for the next (caches, memories, sums), passed in and returned."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Self

from torch import Tensor


@dataclasses.dataclass(frozen=True)
class State:
    """Base of all states: a dataclass of tensors [B, ...], other states, tuples of them, and plain values.

    `renamed`: names of fields in earlier files -> names today.
    """

    renamed: ClassVar[Mapping[str, str]] = {}

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors, in the order of the fields."""
        for field in dataclasses.fields(self):
            yield from tensors_in(getattr(self, field.name))

    @property
    def rows(self) -> int | None:
        """The number of rows of the batch; None before the first token, when there are no tensors."""
        return next((tensor.shape[0] for tensor in self.tensors()), None)

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Return a copy with `function` applied to every tensor."""
        return self._each(function, lambda state: state.map(function))

    def reorder(self, index: Tensor) -> Self:
        """Return the state of batch rows `index` [B'], as beam search needs after every step."""
        return self._each(lambda tensor: tensor.index_select(0, index), lambda state: state.reorder(index))

    def reorder_(self, index: Tensor) -> Self:
        """Return the same as `reorder`, and may overwrite this state: the caller must not use it again."""
        return self.reorder(index)

    def truncated_(self, count: int) -> Self | None:
        """Return the state before its last `count` tokens; the caller must not use this state again.

        None if tokens cannot be removed, as from sums of the past: the caller then continues from the earlier
        state, which stays valid.
        """
        return None

    def detach(self) -> Self:
        """Return the same values outside the graph, so that segments can be trained one after another."""
        return self.map(Tensor.detach)

    def compact(self) -> Self:
        """Return the same state without spare capacity, as it is saved."""
        return self._each(lambda tensor: tensor, lambda state: state.compact())

    def _each(self, on_tensor: Callable[[Tensor], Tensor], on_state: "Callable[[State], State]") -> Self:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return dataclasses.replace(
            self, **{name: _each(value, on_tensor, on_state) for name, value in fields.items()}
        )


@dataclasses.dataclass(frozen=True)
class StateOfStates(State):
    """Base of states in which only the states grow with the tokens, and no tensor."""

    def truncated_(self, count: int) -> Self | None:
        """See `State.truncated_`: the states lose their last tokens."""
        parts: list[State | None] = []

        def truncate(state: State) -> State:
            parts.append(state.truncated_(count))
            return parts[-1] or state

        shorter = self._each(lambda tensor: tensor, truncate)
        return None if None in parts else shorter


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in the value of a field."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, State):
        yield from value.tensors()
    elif isinstance(value, tuple):
        for item in value:
            yield from tensors_in(item)


def _each(value: Any, on_tensor: Callable[[Tensor], Tensor], on_state: Callable[[State], State]) -> Any:
    if isinstance(value, Tensor):
        return on_tensor(value)
    if isinstance(value, State):
        return on_state(value)
    if isinstance(value, tuple):
        return tuple(_each(item, on_tensor, on_state) for item in value)
    return value
