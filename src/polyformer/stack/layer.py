"""One layer: self-attention, cross-attention where there is a source, feed-forward, wired by a block."""

import dataclasses

from torch import Tensor, nn

from polyformer.block import BlockConfig, SubLayer
from polyformer.core.detached import detached
from polyformer.core.state import State
from polyformer.feedforward import FeedForwardConfig
from polyformer.memory import Memory
from polyformer.ops.norms import NormConfig
from polyformer.position import Position
from polyformer.sequence.context import Context
from polyformer.stack.multihead import AttentionConfig, MultiHeadAttention


@dataclasses.dataclass(frozen=True)
class LayerState(State):
    """What a layer leaves for the next call: its own tokens, and the projected source.

    memory: in training what it remembers of earlier segments, in place of its own tokens' keys and values.
    """

    self_attention: State | None = None
    cross_attention: State | None = None
    memory: State | None = None

    def reorder_beams(self, index: Tensor) -> "LayerState":
        """As `reorder_`, for an index among rows that share a source, whose projection stays where it is."""
        own, memory = (
            None if past is None else past.reorder_(index) for past in (self.self_attention, self.memory)
        )
        return dataclasses.replace(self, self_attention=own, memory=memory)

    def truncated_(self, count: int) -> "LayerState | None":
        """As for every state."""
        return self._parts_truncated(count)


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """What a decoder reads from: hidden states [B, S, E] (None once every layer has projected them)."""

    hidden: Tensor | None
    context: Context


class Layer(nn.Module):
    """x [B, T, E] -> [B, T, E]."""

    def __init__(
        self,
        hidden_size: int,
        attention: AttentionConfig,
        feedforward: FeedForwardConfig,
        block: BlockConfig,
        norm: NormConfig,
        dropout: float,
        cross: bool,
        index: int,
    ):
        super().__init__()
        self.attention = attention.build(hidden_size, index)
        self.cross_attention: MultiHeadAttention | None = (
            attention.cross().build(hidden_size, index) if cross else None
        )
        self.feedforward = feedforward.at(index).build(hidden_size)
        self.block = block.build(hidden_size, 3 if cross else 2, norm, dropout)

    def new_state(self, reserve: int) -> "LayerState":
        """The state before the first token, with room for `reserve` tokens."""
        return LayerState(self.attention.new_state(reserve))

    def forward(
        self,
        x: Tensor,
        context: Context,
        position: Position,
        source: Source | None = None,
        state: LayerState | None = None,
        memory: Memory | None = None,
    ) -> tuple[Tensor, LayerState | None]:
        """The layer's output, and its next state when it was given one."""
        new: dict[str, State | None] = {}
        y = self.block(x, self.sublayers(context, position, source, state, new, memory))
        if state is None:
            return y, None
        return y, LayerState(new["self"], new.get("cross"), self.remembered(x, state, memory))

    def remembered(self, x: Tensor, state: LayerState, memory: Memory | None) -> State | None:
        """What the layer remembers after the segment of which x is its input."""
        if memory is None or state.memory is None:
            return None
        return memory.after(state.memory, self.block.kept(x), self)

    @property
    def index(self) -> int:
        """The number of its weights in the stack."""
        return self.attention.layer

    def by_content(self, x: Tensor, read: Tensor) -> tuple[Tensor, Tensor]:
        """What its heads find for x [B, T, E] in `read` [B, M, E], both as a memory keeps them: outputs
        [B, H, T, D] and weights [B, H, T, M]. Positions play no part, and its weights get no gradient."""
        block = detached(self.block)
        x, read = block.first_reads_kept(x), block.first_reads_kept(read)
        return detached(self.attention).by_content(x, read)

    def sublayers(
        self,
        context: Context,
        position: Position,
        source: Source | None,
        state: LayerState | None,
        new: dict[str, State | None],
        memory: Memory | None = None,
    ) -> list[SubLayer]:
        """What the block is given, in order; their next states go into `new`."""

        def attend_self(x: Tensor) -> Tensor:
            past = state.self_attention if state else None
            before = memory.before(state.memory) if memory and state and state.memory else None
            before = None if before is None else self.block.first_reads_kept(before)
            y, new["self"] = self.attention(x, context, position, past, before=before)
            return y

        def attend_source(x: Tensor) -> Tensor:
            assert self.cross_attention is not None
            assert source is not None
            past = state.cross_attention if state else None
            y, new["cross"] = self.cross_attention.cross(x, source.hidden, source.context, past)
            return y

        both = [attend_self] if self.cross_attention is None else [attend_self, attend_source]
        return [*both, lambda x: self.feedforward(x, context)]

    def again(self, x: Tensor, read: Tensor, context: Context, position: Position) -> Tensor:
        """The output of an encoder's layer for x when attention finds the layer input `read` instead of x."""
        shown = self.block.first_reads(read)
        return self.block(
            x,
            [
                lambda x: self.attention(x, context, position, read=shown)[0],
                lambda x: self.feedforward(x, context),
            ],
        )
