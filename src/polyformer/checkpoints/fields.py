"""The table between a public configuration and ours: read one way it loads, read the other way it saves.

Both sides are plain nested dicts. A `Field` ties one of their entries to one or more places in our tree, by
dotted path; what a table cannot say, a family says in two functions (`Family.adjust`, `Family.describe`).
"""

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from polyformer.core.errors import InputError, quote, unknown

Tree = dict[str, Any]


def same(value: Any) -> Any:
    return value


@dataclasses.dataclass(frozen=True)
class Field:
    """`theirs` means `default` where it is absent; `read` and `write` turn its value into ours and back."""

    theirs: str
    default: Any
    ours: tuple[str, ...]
    read: Callable[[Any], Any] = same
    write: Callable[[Any], Any] = same


def field(theirs: str, default: Any, *ours: str) -> Field:
    """The same value on both sides."""
    return Field(theirs, default, ours)


def both(option: str) -> tuple[str, str]:
    """The paths of an option of an encoder and a decoder."""
    return f"encoder.{option}", f"decoder.{option}"


def choice(theirs: str, default: Any, names: Mapping[Any, Any], *ours: str) -> Field:
    """A value that has another name on our side: `names` maps theirs to ours, the first of equals back."""
    back: dict[Any, Any] = {}
    for name, one in names.items():
        back.setdefault(one, name)

    def translate(table: Mapping[Any, Any]) -> Callable[[Any], Any]:
        def look(value: Any) -> Any:
            if not isinstance(value, Hashable) or value not in table:
                raise unknown(theirs, value, map(str, table))
            return table[value]

        return look

    return Field(theirs, default, ours, translate(names), translate(back))


ACTIVATIONS = {
    "gelu": "gelu",
    "relu": "relu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
}
"""Their names of activations, and ours."""


def act(theirs: str, default: str, *ours: str) -> Field:
    """The name of an activation."""
    return choice(theirs, default, ACTIVATIONS, *ours)


def put(tree: Tree, path: str, value: Any) -> None:
    """Set what stands at a dotted path."""
    *parents, last = path.split(".")
    for name in parents:
        tree = tree[name]
    assert last in tree, f"no such option: {path}"
    tree[last] = value


def look_up(tree: Tree, path: str) -> Any:
    """What stands at a dotted path."""
    found: Any = tree
    for name in path.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return found


def read_fields(fields: tuple[Field, ...], hub: Tree, tree: Tree) -> None:
    """Put what `hub` says into our `tree`."""
    for one in fields:
        value = one.read(hub.get(one.theirs, one.default))
        for path in one.ours:
            put(tree, path, value)


def write_fields(fields: tuple[Field, ...], tree: Tree) -> Tree:
    """What their configuration says of our `tree`; nothing of a stack that it has not."""
    found: Tree = {}
    for one in fields:
        path = next((path for path in one.ours if "." not in path or tree.get(path.split(".")[0])), None)
        if path is not None:
            found[one.theirs] = one.write(look_up(tree, path))
    return found


def check_fixed(fixed: Mapping[str, Any], hub: Tree) -> None:
    """Raises `InputError` where `hub` asks for something that we do not compute."""
    for name, value in fixed.items():
        given = hub.get(name, value)
        if given != value and not (given is None and not value):
            raise InputError(f"config.json: {name} is {quote(given)}, and only {quote(value)} is supported")


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """The dotted paths at which two trees differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = dict.fromkeys([*a, *b])
        return [
            one
            for key in keys
            for one in differences(a.get(key), b.get(key), f"{where}.{key}" if where else key)
        ]
    return [] if a == b else [f"{where}: {quote(a)} instead of {quote(b)}"]
