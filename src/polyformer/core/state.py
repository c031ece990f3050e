"""States: what one call leaves for the next (caches, memories, sums), passed in and returned, and saved.

The file of a model's state has the tensors, named by their place in the state, and the rest of its structure
as bytes of JSON, so that an interrupted text resumes, bit for bit. Nothing in a file is executed: it names
classes of states, which must be imported.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from polyformer.core.config import Config
from polyformer.core.errors import InputError, quote
from polyformer.core.files import read_tensors, write_tensors
from polyformer.core.parsing import parse_json
from polyformer.core.registry import in_package


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


STRUCTURE = "structure"


def save_state(state: State, path: str | Path) -> None:
    """Write a state, such as a model's `output.state`, as one safetensors file, atomically."""
    write_tensors(path, state_tensors(state))


def load_state(path: str | Path) -> Any:
    """Return the state that `save_state` wrote, on the CPU; `InputError` for other files."""
    return state_of(read_tensors(path), path)


def state_tensors(state: State) -> dict[str, Tensor]:
    """Return the tensors of a state by name, and its structure as a further tensor, [bytes]."""
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_described(state.compact(), "state", tensors))
    return {**tensors, STRUCTURE: torch.tensor(list(text.encode()), dtype=torch.uint8)}


def state_of(tensors: dict[str, Tensor], source: object) -> Any:
    """Return the state of these tensors, read from `source`; `InputError` if they are not a state."""
    if STRUCTURE not in tensors or tensors[STRUCTURE].dtype != torch.uint8:
        raise InputError(f"{source}: not a saved state of a model")
    described = parse_json(bytes(tensors[STRUCTURE].flatten().tolist()), source, dict)
    try:
        return _read(described, tensors, source)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{source}: damaged: {type(error).__name__} {error}") from error


def _described(value: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    """Return JSON that describes a value; its tensors are added to `tensors`."""
    if isinstance(value, Tensor):
        tensors[place] = value.detach().clone(memory_format=torch.contiguous_format)
        return {"tensor": place}
    if isinstance(value, State):
        fields = {
            field.name: _described(getattr(value, field.name), f"{place}.{field.name}", tensors)
            for field in dataclasses.fields(value)
        }
        return {"state": _name(type(value)), "fields": fields}
    if isinstance(value, tuple):
        return {"tuple": [_described(item, f"{place}.{i}", tensors) for i, item in enumerate(value)]}
    return {"value": value.to_dict() if isinstance(value, Config) else value}


def _read(node: dict[str, Any], tensors: dict[str, Tensor], source: object) -> Any:
    """Return the value that `_described` describes."""
    if "tensor" in node:
        return tensors[node["tensor"]]
    if "tuple" in node:
        return tuple(_read(item, tensors, source) for item in node["tuple"])
    if "value" in node:
        return node["value"]
    kind = _kind(node["state"])
    if kind is None:
        raise InputError(
            f"{source}: a state of {quote(node['state'])}, which is not imported; import its module first"
        )
    fields = {name: _read(field, tensors, source) for name, field in node["fields"].items()}
    return kind(**{kind.renamed.get(name, name): value for name, value in fields.items()})


def _name(kind: type[State]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _kind(name: str) -> type[State] | None:
    """Return the class of states with this name, None if it is not imported.

    The module of a class of polyformer may have had another name when the file was written.
    """
    kinds = {_name(kind): kind for kind in _below(State)}
    if name in kinds or not name.startswith("polyformer."):
        return kinds.get(name)
    moved = [kind for kind in kinds.values() if in_package(kind) and kind.__qualname__ == name.split(".")[-1]]
    return moved[0] if len(moved) == 1 else None


def _below(kind: type[State]) -> Iterator[type[State]]:
    for child in kind.__subclasses__():
        yield child
        yield from _below(child)
