"""Sharing of weights between the layers of a stack: groups of layers that run several times (ALBERT)."""

from collections.abc import Sequence
from typing import Any

from polyformer.core.errors import InputError, quote


def shared_layers(layers: int, groups: int | None, size: int) -> list[int]:
    """Return for each of `layers` layers the index of its weights among all distinct layers.

    There are `groups` groups of `size` layers. A group runs its layers in turn, repeatedly, until the next
    group begins. Without groups every layer has separate weights.
    """
    if groups is None:
        return list(range(layers))
    runs = layers // size
    return [run * groups // runs * size + place for run in range(runs) for place in range(size)]


def check_groups(layers: int, groups: int | None, size: int, parts: Sequence[Any]) -> None:
    """Raise `InputError` for impossible groups, and for `parts` that differ in layers of the same weights."""
    if size < 1 or layers % size or (groups is None and size > 1):
        raise InputError(
            f"layers_per_group: expected a divisor of the {layers} layers, and 1 without num_hidden_groups, "
            f"got {size}"
        )
    most = layers // size
    if groups is not None and not 1 <= groups <= most:
        raise InputError(f"num_hidden_groups: expected 1 to {most} layers, or None, got {groups}")
    shared = shared_layers(layers, groups, size)
    for layer, number in enumerate(shared):
        first = shared.index(number)
        for part in parts:
            if part.for_layer(layer) != part.for_layer(first):
                raise InputError(
                    f"num_hidden_groups: layers {first} and {layer} share weights, and {quote(part.kind)} "
                    f"differs between layers; use the same in all layers"
                )
