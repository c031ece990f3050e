"""The attention layers of a transformers model: modules that dispatch through `AttentionInterface`."""

import dataclasses
import fnmatch
import functools
import inspect
import re
from collections.abc import Iterable
from typing import Any

from torch import nn

from polyformer.core.errors import InputError, quote

# Names of layers with keys of another sequence.
CROSS = re.compile(r"cross|encoder_attn|encdec|enc_dec|encoder_decoder|encoder_attention", re.IGNORECASE)

HEADS = "num_heads", "num_attention_heads", "n_heads", "n_head"


@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
    """An attention layer: its module, dotted name, and number in its stack."""

    module: nn.Module
    name: str
    index: int
    cross: bool  # keys of another sequence

    @property
    def num_heads(self) -> int:
        """The number of query heads; raises `InputError` if neither module nor configuration has it."""
        for owner in (self.module, getattr(self.module, "config", None)):
            for name in HEADS:
                number = getattr(owner, name, None)
                if isinstance(number, int):
                    return number
        raise InputError(f"position: the number of heads of {self.name} is unknown")


def attention_layers(model: nn.Module) -> list[Layer]:
    """Return all attention layers of a model that dispatch, in the model's order."""
    layers, counts = [], dict[str, int]()
    for name, module in model.named_modules():
        if uses_attention_interface(type(module)):
            stack = re.sub(r"\d+", "*", name)
            place = counts.get(stack, 0)
            counts[stack] = place + 1
            own = getattr(module, "layer_idx", None)
            cross = bool(CROSS.search(f"{name} {type(module).__name__}")) or is_cross(module)
            layers.append(Layer(module, name, own if isinstance(own, int) else place, cross))
    return layers


def is_cross(module: Any) -> bool:
    """Return whether a module declares itself as cross-attention."""
    return bool(getattr(module, "is_cross_attention", False))


@functools.cache
def uses_attention_interface(kind: type[nn.Module]) -> bool:
    """Return whether modules of this class dispatch through the interface."""
    try:
        source = inspect.getsource(inspect.unwrap(kind.forward))
    except (OSError, TypeError):
        return False
    return "ALL_ATTENTION_FUNCTIONS" in source


def select_layers(layers: list[Layer], which: Iterable[int | str] | int | str | None) -> list[Layer]:
    """Return the self-attention layers of `which`: numbers in their stacks, or names with `*`; None for all.

    A name may be a part of the full name: "encoder" or "text_model.*.3". Raises `InputError` if no layer has
    the number or name.
    """
    own = [layer for layer in layers if not layer.cross]
    if which is None:
        return own
    found_by = [which] if isinstance(which, int | str) else list(which)
    for part in found_by:
        if not any(_matches(layer, part) for layer in own):
            if not own:
                raise InputError(f"layers: the model has no self-attention layers, got {quote(part)}")
            stacks = sorted({re.sub(r"\d+", "*", layer.name) for layer in own})
            numbers = sorted({layer.index for layer in own})
            raise InputError(
                f"layers: no self-attention layer is called {quote(part)}; there are {', '.join(stacks)}, "
                f"numbered {numbers[0]} to {numbers[-1]}"
            )
    return [layer for layer in own if any(_matches(layer, part) for part in found_by)]


def _matches(layer: Layer, part: int | str) -> bool:
    if isinstance(part, int):
        return layer.index == part
    return fnmatch.fnmatchcase(f".{layer.name}.", f"*.{part}.*")
