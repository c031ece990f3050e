"""A state in a file: the state of a model in one safetensors file.

The file has the tensors, named by their place in the state, and the rest of its structure as bytes of JSON,
so that an interrupted text resumes, bit for bit. Nothing in a file is executed: it names classes of states,
which must be imported.
"""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyformer.core.config import Config
from polyformer.core.errors import InputError, quote
from polyformer.core.files import read_tensors, write_tensors
from polyformer.core.parsing import parse_json
from polyformer.core.registry import in_package
from polyformer.core.state import State

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
