"""One layer: self-attention, cross-attention where there is a source, feed-forward, wired by a block."""

import dataclasses

from torch import Tensor, nn

from polyformer.block import BlockConfig, SubLayer
from polyformer.core.state import State
from polyformer.feedforward import FeedForwardConfig
from polyformer.ops.norms import NormConfig
from polyformer.position import Position
from polyformer.sequence.context import Context
from polyformer.stack.multihead import AttentionConfig, MultiHeadAttention


@dataclasses.dataclass(frozen=True)
class LayerState(State):
    """What a layer leaves for the next call: its own tokens, and the projected source."""

    self_attention: State | None = None
    cross_attention: State | None = None

    def reorder_beams(self, index: Tensor) -> "LayerState":
        """As `reorder_`, for an index among rows that share a source, whose projection stays where it is."""
        past = self.self_attention
        return dataclasses.replace(self, self_attention=None if past is None else past.reorder_(index))

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
    ) -> tuple[Tensor, LayerState | None]:
        """The layer's output, and its next state when it was given one."""
        new: dict[str, State | None] = {}
        x = self.block(x, self.sublayers(context, position, source, state, new))
        return x, LayerState(new["self"], new.get("cross")) if state else None

    def sublayers(
        self,
        context: Context,
        position: Position,
        source: Source | None,
        state: LayerState | None,
        new: dict[str, State | None],
    ) -> list[SubLayer]:
        """What the block is given, in order; their next states go into `new`."""

        def attend_self(x: Tensor) -> Tensor:
            y, new["self"] = self.attention(x, context, position, state.self_attention if state else None)
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
