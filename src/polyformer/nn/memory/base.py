"""The interface of memories: recurrence over the segments of a text.

The interface of memories: recurrence over the segments of a text.

A text is read in segments. Each segment is a call of the model with the state that the previous call
returned. In training a layer's state is a memory of vectors, through which its tokens attend to earlier
segments, and which gets no gradient. In evaluation, where weights are constant, a memory may keep keys and
values instead.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Protocol

from annotated_types import Ge
from torch import Tensor, nn

from polyformer.attention.mechanisms import MechanismConfig
from polyformer.attention.positions import Position, Shape
from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.ranges import check_range
from polyformer.core.sequence.context import Context
from polyformer.core.sequence.tokens import Tokens
from polyformer.core.state import State


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryConfig(Config):
    """The base class of memories: `build(shape)` returns the module of a whole stack, or None.

    `reversible`: whether a reversible stack, which keeps no activations, may have it. `segments`: whether
    training must read a text in segments, in their order.
    """

    option: ClassVar[str] = "model.memory"
    reversible: ClassVar[bool] = True
    segments: ClassVar[bool] = True

    def limited(self, mechanism: MechanismConfig) -> MechanismConfig:
        """Return a layer's mechanism with only the keys that the memory keeps, by default all."""
        return mechanism

    def count_positions(self, position: Position) -> None:
        """Let a scheme count positions as the memory does, by default in the text."""

    def build(self, shape: Shape) -> "Memory | None":
        """Return the module, for all layers of a stack of this shape."""
        raise NotImplementedError


class MemoryLayer(Protocol):
    """The methods of a layer that its memory calls."""

    @property
    def index(self) -> int:
        """Return the index of the layer's weights in the stack."""
        ...

    def content_attention(self, x: Tensor, read: Tensor) -> tuple[Tensor, Tensor]:
        """Return attention of x [B, T, E] to `read` [B, M, E], both in the form that a memory keeps, without
        positions: outputs [B, H, T, D] and weights [B, H, T, M]. The layer's weights get no gradient."""
        ...

    def keys_and_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, Hkv, T, D] of x [B, T, E] in the form that a memory keeps, before
        positions and without a graph."""
        ...


class Memory(nn.Module):
    """A memory of a whole stack, including its parameters of single layers.

    `length`: the greatest number of slots before a segment; a change takes effect at the end of the next
    call. `supports_kv_cache`: whether a cache of the last `length` keys and values is equivalent in
    evaluation. `has_store`: whether a layer has a store of entries beyond the reach of attention.
    """

    supports_kv_cache = True
    has_store = False

    def __init__(self, length: int):
        super().__init__()
        check_range("memory.length", length, Ge(0))
        self.length = length

    def new_state(self, layer: int) -> State:
        """Return the memory of layer `layer` before the first token, in training."""
        raise NotImplementedError

    def past_inputs(self, state: State) -> Tensor | None:
        """Return the remembered inputs of a layer at the slots before a segment, [B, M, E], or None."""
        raise NotImplementedError

    def next_state(self, state: State, x: Tensor, layer: MemoryLayer) -> State:
        """Return the next state of `layer`, after a segment with the layer inputs x [B, T, E]."""
        raise NotImplementedError

    def remembered_tokens(self, tokens: Tokens) -> Tokens:
        """Return the positions and masks of the slots for the next segment, after `tokens`."""
        # Masks and positions must cover the same slots as the vectors of the layers.
        return tokens.last_kept(self.length)

    @property
    def sizes(self) -> dict[str, int]:
        """Return the maximum sizes of the memory, by the names of `polyformer evaluate`."""
        return {"memory_length": self.length}

    def init_added(self) -> None:
        """Initialize a memory that is added to a trained model, so that it changes the model very little."""

    def trained_modules(self, layers: Sequence[nn.Module]) -> list[nn.Module] | None:
        """Return the trained parts of a model with these decoder layers; None for the whole model."""
        return None

    def new_store(self, layer: int) -> State | None:
        """Return the store of layer `layer` before the first token, in training and evaluation, or None."""
        return None

    def update_store(self, store: State, x: Tensor, layer: MemoryLayer, context: Context) -> State:
        """Return the store after a segment with the inputs x [B, T, E] of `layer`."""
        raise NotImplementedError

    def mix_with_store(self, y: Tensor, q: Tensor, store: State, context: Context) -> Tensor:
        """Return the heads' output [B, H, T, D] from the attention output y, the queries q and the store."""
        raise NotImplementedError


def set_length(model: nn.Module, length: int) -> None:
    """Set the length of every memory in `model`; raises `InputError` if there is none."""
    check_range("memory.length", length, Ge(0))
    memories = [module for module in model.modules() if isinstance(module, Memory)]
    if not memories:
        raise InputError("memory_length: this model has no memory; leave memory_length out")
    for memory in memories:
        memory.length = length


def check_position(position: Position) -> None:
    """Raise `InputError` for a position scheme with a limited number of positions or with labels of pairs."""
    fix = "use a scheme of distances, such as 'transformer_xl', 'rope', 'alibi' or 't5'"
    if position.max_positions is not None:
        name, limit = type(position).__name__, position.max_positions
        raise InputError(
            f"memory: {name} positions end after {limit} tokens, but a text with a memory has no end; {fix}"
        )
    if position.num_relations is not None:
        raise InputError(f"memory: labels of pairs exist only for the tokens of one call; {fix}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoMemoryConfig(MemoryConfig):
    """No memory: each segment is trained without the segments before it."""

    kind: ClassVar[str] = "none"
    segments: ClassVar[bool] = False

    def build(self, shape: Shape) -> None:
        """Return None."""
        return
