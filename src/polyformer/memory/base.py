"""What a stack remembers of the segments of a text that it has read: the seam of recurrence over segments.

A text is read in segments, each a call of the model with the state that the call before it returned. In
training a layer's state is a memory of vectors, by which its tokens attend to earlier segments, and into
which no gradient flows; in evaluation, where weights stay, a memory may keep the keys and values themselves.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Protocol

from torch import Tensor, nn

from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.state import State
from polyformer.position import Position, Shape
from polyformer.sequence.context import Context
from polyformer.sequence.tokens import Tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryConfig(Config):
    """Family of memories: `build(shape)` makes the module of a whole stack, None where there is none.

    `reversible`: whether a stack may have it that keeps no activations.
    """

    reversible: ClassVar[bool] = True

    def build(self, shape: Shape) -> "Memory | None":
        """The module, for all layers of a stack of this shape."""
        raise NotImplementedError


class Reader(Protocol):
    """What a memory asks of the layer that has it."""

    @property
    def index(self) -> int:
        """The number of its weights in the stack."""
        ...

    def by_content(self, x: Tensor, read: Tensor) -> tuple[Tensor, Tensor]:
        """What its heads find for x [B, T, E] in `read` [B, M, E], both as a memory keeps them, by content
        alone: outputs [B, H, T, D] and weights [B, H, T, M]. Its own weights get no gradient."""
        ...

    def keys_and_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Of x [B, T, E], as a memory keeps it: [B, Hkv, T, D] each, before positions, without a graph."""
        ...


class Memory(nn.Module):
    """One memory for a whole stack; what layers have of their own lies here too.

    `length`: how many slots before a segment its tokens find at most; it may be changed at any time, and
    holds from the end of the next call on. `keeps_keys`: whether in evaluation the last `length` keys and
    values of a cache are the same function. `looks_up`: whether a layer has a store of entries that attention
    does not reach, beside either form of its state.
    """

    keeps_keys = True
    looks_up = False

    def __init__(self, length: int):
        super().__init__()
        check_length(length)
        self.length = length

    def new_state(self, layer: int) -> State:
        """What layer `layer` remembers before the first token, in training."""
        raise NotImplementedError

    def before(self, state: State) -> Tensor | None:
        """What a layer remembers of its inputs at the slots before a segment, [B, M, E]; None for nothing."""
        raise NotImplementedError

    def after(self, state: State, x: Tensor, layer: Reader) -> State:
        """The next state of `layer`, after a segment of which its inputs are x [B, T, E]."""
        raise NotImplementedError

    def kept(self, tokens: Tokens) -> Tokens:
        """Where the tokens of the slots stand that the next segment finds, after `tokens`."""
        return tokens.last_kept(self.length)

    @property
    def sizes(self) -> dict[str, int]:
        """What it holds at most, by the names of `polyformer evaluate`."""
        return {"memory_length": self.length}

    def added(self) -> None:
        """Begin as what changes next to nothing: the memory of a model that was trained without."""

    def trained(self, layers: Sequence[nn.Module]) -> list[nn.Module] | None:
        """What of a model is trained whose decoder has these layers; None for all of it."""
        return None

    def new_store(self, layer: int) -> State | None:
        """The store of layer `layer` before the first token, in training and in evaluation; None for none."""
        return None

    def stored(self, store: State, x: Tensor, layer: Reader, context: Context) -> State:
        """The store after a segment of which the inputs of `layer` are x [B, T, E]."""
        raise NotImplementedError

    def mixed(self, y: Tensor, q: Tensor, store: State, context: Context) -> Tensor:
        """What heads put out, [B, H, T, D], where attention alone makes y of the queries q."""
        raise NotImplementedError


def set_length(model: nn.Module, length: int) -> None:
    """Every memory in `model` from now on of this length; `InputError` where there is none."""
    check_length(length)
    memories = [module for module in model.modules() if isinstance(module, Memory)]
    if not memories:
        raise InputError("memory_length: this model has no memory; leave it out")
    for memory in memories:
        memory.length = length


def check_length(length: int) -> None:
    """Raises `InputError` for a memory of less than nothing."""
    if length < 0:
        raise InputError(f"memory.length: counts tokens, expected 0 or more, got {length}")


def check_position(position: Position) -> None:
    """Raises `InputError` for a scheme that says nothing of a text longer than its table."""
    way = "use a scheme of distances, such as 'transformer_xl', 'rope', 'alibi' or 't5'"
    if position.max_positions is not None:
        name, limit = type(position).__name__, position.max_positions
        raise InputError(
            f"memory: {name} positions end after {limit} tokens, a text with a memory does not; {way}"
        )
    if position.num_relations is not None:
        raise InputError(f"memory: labels of pairs are of the tokens of one call; {way}")
