"""The attention layers of a transformers model: modules that ask `AttentionInterface` what to run."""

import dataclasses
import fnmatch
import functools
import inspect
import re
from collections.abc import Iterable
from typing import Any

from torch import nn

from polyformer.core.errors import InputError, quote

CROSS = re.compile(r"cross|encoder_attn|encdec|enc_dec|encoder_decoder|encoder_attention", re.IGNORECASE)
"""Names of layers whose keys are those of another sequence."""

HEADS = "num_heads", "num_attention_heads", "n_heads", "n_head"


@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
    """One attention layer: its module, its dotted name, its number in its stack; `cross`: of other keys."""

    module: nn.Module
    name: str
    index: int
    cross: bool

    @property
    def num_heads(self) -> int:
        """Query heads; raises `InputError` where neither the module nor its configuration says."""
        for owner in (self.module, getattr(self.module, "config", None)):
            for name in HEADS:
                number = getattr(owner, name, None)
                if isinstance(number, int):
                    return number
        raise InputError(f"position: {self.name} does not say how many heads it has")


def attention_layers(model: nn.Module) -> list[Layer]:
    """All attention layers of a model that dispatch, in its order."""
    layers, counts = [], dict[str, int]()
    for name, module in model.named_modules():
        if dispatches(type(module)):
            stack = re.sub(r"\d+", "*", name)
            place = counts.get(stack, 0)
            counts[stack] = place + 1
            own = getattr(module, "layer_idx", None)
            cross = bool(CROSS.search(f"{name} {type(module).__name__}")) or is_cross(module)
            layers.append(Layer(module, name, own if isinstance(own, int) else place, cross))
    return layers


def is_cross(module: Any) -> bool:
    """Whether a module says of itself that its keys are of another sequence."""
    return bool(getattr(module, "is_cross_attention", False))


@functools.cache
def dispatches(kind: type[nn.Module]) -> bool:
    """Whether modules of this class ask the interface for what they run."""
    try:
        source = inspect.getsource(inspect.unwrap(kind.forward))
    except (OSError, TypeError):
        return False
    return "ALL_ATTENTION_FUNCTIONS" in source


def chosen(layers: list[Layer], which: Iterable[int | str] | int | str | None) -> list[Layer]:
    """The self-attention layers that `which` names: numbers in their stacks, or names with `*`; None for all.

    A name may leave out what stands before and after: "encoder" or "text_model.*.3". Raises `InputError`
    where nothing has that number or name.
    """
    own = [layer for layer in layers if not layer.cross]
    if which is None:
        return own
    found_by = [which] if isinstance(which, int | str) else list(which)
    for part in found_by:
        if not any(_named(layer, part) for layer in own):
            stacks = sorted({re.sub(r"\d+", "*", layer.name) for layer in own})
            numbers = sorted({layer.index for layer in own})
            raise InputError(
                f"layers: no self-attention layer is called {quote(part)}; there are {', '.join(stacks)}, "
                f"numbered {numbers[0]} to {numbers[-1]}"
            )
    return [layer for layer in own if any(_named(layer, part) for part in found_by)]


def _named(layer: Layer, part: int | str) -> bool:
    if isinstance(part, int):
        return layer.index == part
    return fnmatch.fnmatchcase(f".{layer.name}.", f"*.{part}.*")
