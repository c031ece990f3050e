"""Layers of full and of windowed attention in turn: the lists of families, and one pattern of ours."""

from collections.abc import Sequence
from typing import Any, TypeVar

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.patterns import PerLayer, Window
from polyformer.attention.patterns.base import Pattern
from polyformer.attention.patterns.implied import Full
from polyformer.core.errors import InputError, unknown
from polyformer.models.checkpoints.config_mapping import Tree, get_path

T = TypeVar("T")

# The kinds of layers in `layer_types`.
FULL, LOCAL = KINDS = "full_attention", "sliding_attention"


def check_kinds(name: str, kinds: Sequence[str], known: Sequence[str], count: str, hub: Tree) -> None:
    """Raise `InputError` unless an option lists one of the `known` kinds for each layer.

    count: the option with the number of layers.
    """
    for kind in kinds:
        if kind not in known:
            raise unknown(name, str(kind), known)
    if len(kinds) != hub[count]:
        raise InputError(f"config.json: {name} has {len(kinds)} layers, and {count} {hub[count]}")


def set_windows(tree: Tree, windows: list[int | None]) -> None:
    """Set a decoder's pattern: each layer's window in tokens, including the query's own, or None."""
    set_patterns(tree, "decoder", [None if tokens is None else Window(tokens - 1, 0) for tokens in windows])


def get_windows(tree: Tree) -> list[int | None] | None:
    """Return the window of each layer of a decoder in tokens; None without softmax attention."""
    windows = get_patterns(tree, "decoder")
    if windows is None:
        return None
    return [None if window is None else window.before + 1 for window in windows]


def set_patterns(tree: Tree, side: str, windows: Sequence[Window | None]) -> None:
    """Set a stack's pattern: each layer's window, or None for the whole text."""
    # The shortest form, as in presets, so that equal models compare equal.
    parts: list[Pattern] = [Full() if window is None else window for window in period(windows)]
    pattern = parts[0] if len(parts) == 1 else PerLayer(tuple(parts))
    config = SoftmaxConfig(pattern=None if parts == [Full()] else pattern)
    tree[side]["attention"]["mechanism"]["pattern"] = config.to_dict()["pattern"]


def get_patterns(tree: Tree, side: str) -> list[Window | None] | None:
    """Return the window of each layer of a stack, or None; None for all without softmax attention."""
    mechanism: Any = get_path(tree, f"{side}.attention.mechanism") or {}
    if mechanism.get("kind") != "softmax":
        return None
    config = SoftmaxConfig.from_dict(mechanism)
    patterns = [config.for_layer(layer).pattern for layer in range(tree[side]["num_hidden_layers"])]
    return [pattern if isinstance(pattern, Window) else None for pattern in patterns]


def in_turn(name: str, parts: Sequence[Tree]) -> Tree:
    """Return the parts of all layers as one: the only one, or an `alternate` with the list `name`."""
    parts = period(parts)
    return parts[0] if len(parts) == 1 else {"kind": "alternate", name: parts}


def of_layers(name: str, tree: Tree, count: int) -> list[Tree]:
    """Return the part of each of `count` layers, the inverse of `in_turn`."""
    parts = tree[name] if tree["kind"] == "alternate" else [tree]
    return [parts[layer % len(parts)] for layer in range(count)]


def period(values: Sequence[T]) -> list[T]:
    """Return the shortest beginning of a list that gives the whole list by repetition."""
    lengths = range(1, len(values) + 1)
    length = next(n for n in lengths if all(value == values[i % n] for i, value in enumerate(values)))
    return list(values[:length])
