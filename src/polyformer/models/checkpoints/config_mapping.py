"""The table between a public config.json and our configuration, read in one direction to load and in the
other to save.

Both sides are plain nested dicts. An `Option` maps an entry of theirs to one or more entries in our tree, by
dotted path; a family handles the rest in two functions (`read_other_options`, `write_other_options`).
"""

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from polyformer.core.errors import InputError, quote, unknown
from polyformer.core.ops.layers import ActivationName

Tree = dict[str, Any]


def identity(value: Any) -> Any:
    """Return the value unchanged."""
    return value


@dataclasses.dataclass(frozen=True)
class Option:
    """An option of theirs, `default` if absent; `read` converts its value to ours, `write` back."""

    theirs: str
    default: Any
    ours: tuple[str, ...]
    read: Callable[[Any], Any] = identity
    write: Callable[[Any], Any] = identity


def option(theirs: str, default: Any, *ours: str) -> Option:
    """Return an option with the same value on both sides."""
    return Option(theirs, default, ours)


def choice(theirs: str, default: Any, names: Mapping[Any, Any], *ours: str) -> Option:
    """Return an option with other names of values here: `names` maps their names to ours.

    If several of their names map to one of ours, the first is written.
    """
    back: dict[Any, Any] = {}
    for name, value in names.items():
        # The first of several names is the usual one.
        back.setdefault(value, name)

    def translate(table: Mapping[Any, Any]) -> Callable[[Any], Any]:
        def look_up(value: Any) -> Any:
            if not isinstance(value, Hashable) or value not in table:
                raise unknown(theirs, value, map(str, table))
            return table[value]

        return look_up

    return Option(theirs, default, ours, translate(names), translate(back))


# Their names of activations, with ours.
ACTIVATIONS: dict[str, ActivationName] = {
    "gelu": "gelu",
    "relu": "relu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
    "quick_gelu": "quick_gelu",
}


def activation(theirs: str, default: str, *ours: str) -> Option:
    """Return an option that names an activation."""
    return choice(theirs, default, ACTIVATIONS, *ours)


def flag(theirs: str, *ours: str, default: bool = False) -> Option:
    """Return an option for biases: all or none. A partial setting of ours is written as none."""
    return Option(theirs, default, ours, write=lambda bias: bias is True)


def projection_biases(theirs: str) -> Option:
    """Return an option for the biases of an encoder's queries, keys and values; the output keeps its bias."""
    # a list names the projections with a bias
    return Option(
        theirs,
        True,
        ("encoder.attention.bias",),
        lambda biased: True if biased else ["output"],
        lambda bias: bias is True,
    )


# The kinds of labels of a text.
PROBLEM = choice(
    "problem_type",
    None,
    {
        None: None,
        "regression": "regression",
        "single_label_classification": "single_label",
        "multi_label_classification": "multi_label",
    },
    "problem",
)


def with_defaults(options: tuple[Option, ...], defaults: Tree, *without: str) -> tuple[Option, ...]:
    """Return the options of a related family with other defaults, except the options `without`."""
    return tuple(
        dataclasses.replace(option, default=defaults.get(option.theirs, option.default))
        for option in options
        if option.theirs not in without
    )


def set_path(tree: Tree, path: str, value: Any) -> None:
    """Set the entry at a dotted path, which must exist."""
    *parents, last = path.split(".")
    for name in parents:
        tree = tree[name]
    assert last in tree, f"no such option: {path}"
    tree[last] = value


def get_path(tree: Tree, path: str) -> Any:
    """Return the entry at a dotted path; None if there is none."""
    entry: Any = tree
    for name in path.split("."):
        entry = entry.get(name) if isinstance(entry, dict) else None
    return entry


def read_options(options: tuple[Option, ...], hub: Tree, tree: Tree) -> None:
    """Set the options of their configuration `hub` in our `tree`."""
    for option in options:
        value = option.read(hub.get(option.theirs, option.default))
        for path in option.ours:
            set_path(tree, path, value)


def write_options(options: tuple[Option, ...], tree: Tree) -> Tree:
    """Return their configuration for our `tree`, without the options of a missing stack."""
    hub: Tree = {}
    for option in options:
        # An option of both stacks is written from a stack that exists.
        path = next((path for path in option.ours if "." not in path or tree.get(path.split(".")[0])), None)
        if path is not None:
            hub[option.theirs] = option.write(get_path(tree, path))
    return hub


def check_required(required: Mapping[str, Any], hub: Tree) -> None:
    """Raise `InputError` for an option with a value that is not supported."""
    for name, supported in required.items():
        value = hub.get(name, supported)
        # Null means false or 0.
        if value != supported and not (value is None and not supported):
            raise InputError(
                f"config.json: {name} is {quote(value)}, and only {quote(supported)} is supported"
            )


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Return the dotted paths at which two trees differ, with both values."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = dict.fromkeys([*a, *b])
        return [
            difference
            for key in keys
            for difference in differences(a.get(key), b.get(key), f"{path}.{key}" if path else key)
        ]
    return [] if a == b else [f"{path}: {quote(a)} instead of {quote(b)}"]
