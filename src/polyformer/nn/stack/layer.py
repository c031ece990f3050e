"""A layer of a Transformer: self-attention, cross-attention if there is a source, and feed-forward.

A block wires the sub-layers around the residual stream, for example as x + f(norm(x)). What only some models
add to a layer, such as a memory or tokens that halt, is in `FeatureLayer`.
"""

import dataclasses
from functools import partial

from torch import Tensor, nn

from polyformer.attention.positions import Position
from polyformer.core.parts import submodule
from polyformer.core.sequence.context import Context
from polyformer.core.state import State, StateOfStates
from polyformer.nn.block import Block, SubLayer
from polyformer.nn.depth import Active
from polyformer.nn.feedforward import FeedForward, NoFeedForward
from polyformer.nn.memory import Memory
from polyformer.nn.stack.beside import AttentionBeside
from polyformer.nn.stack.config import AttentionConfig, StackConfig
from polyformer.nn.stack.feature_attention import FeatureAttention
from polyformer.nn.stack.indexed import IndexedAttention, IndexedLatentAttention
from polyformer.nn.stack.latent import LatentAttention
from polyformer.nn.stack.multihead import MultiHeadAttention


@dataclasses.dataclass(frozen=True)
class LayerState(StateOfStates):
    """The state of a layer for the next call: its tokens, and the projected source.

    memory: in training the memory of earlier segments, instead of the KV cache of its tokens.
    store: entries of earlier text to look up, if the memory has a store in this layer.
    feedforward: the last tokens of the feed-forward, if it sees more than a single token.
    """

    self_attention: State | None = None
    cross_attention: State | None = None
    memory: State | None = None
    store: State | None = None
    feedforward: State | None = None

    def reorder_beams(self, index: Tensor) -> "LayerState":
        """Reorder the rows as `reorder_`, for rows that share a source: its projection is not reordered."""
        names = "self_attention", "memory", "store", "feedforward"
        own = {name: past.reorder_(index) for name in names if (past := getattr(self, name)) is not None}
        return dataclasses.replace(self, **own)


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """The source of a decoder: hidden states [B, S, E] (None once every layer has projected them)."""

    hidden: Tensor | None
    context: Context


@dataclasses.dataclass(eq=False)
class LayerCall:
    """The arguments of a call of a layer, besides its input; only `state` differs between layers.

    first_values: the first layer's values [B, Hkv, T, D], for a value residual. active, all_tokens: the
    tokens for which a layer with halting computes its output, and its input [B, T, E], of all tokens.
    """

    context: Context
    position: Position
    source: Source | None = None
    state: LayerState | None = None
    memory: Memory | None = None
    first_values: Tensor | None = None
    active: Active | None = None
    all_tokens: Tensor | None = None


NewStates = dict[str, State | None]
"""The next states of a layer by their names in `LayerState`, which its sub-layers write."""


class Layer(nn.Module):
    """A layer of a Transformer: x [B, T, E] -> [B, T, E].

    config: the stack's. cross: the attention to a source, None for none. index: of the weights in the stack.
    """

    block: Block = submodule()
    attention: MultiHeadAttention = submodule()
    cross_attention: MultiHeadAttention | None = submodule()
    feedforward: FeedForward = submodule()

    def __init__(
        self, hidden_size: int, config: StackConfig, cross: AttentionConfig | None = None, index: int = 0
    ):
        super().__init__()
        attention, block = config.attention, config.block
        self.attention = self.attention_class(attention, index)(hidden_size, attention, index)
        self.cross_attention = cross and self.attention_class(cross, index)(hidden_size, cross, index)
        self.feedforward = config.feedforward.for_layer(index).build(hidden_size)
        if block.exceeds_float16:
            self.feedforward.widen()
        self.has_feedforward = not isinstance(self.feedforward, NoFeedForward)
        self.feedforward_has_state = self.feedforward.new_state() is not None
        sublayers = 1 + (cross is not None) + self.has_feedforward
        self.block = block.for_layer(index).build(hidden_size, sublayers, config.norm, config.dropout)
        self.tokenwise = config.norm.tokenwise

    def attention_class(self, config: AttentionConfig, index: int) -> type[MultiHeadAttention]:
        """Return the class of an attention of this layer."""
        if config.indexer is not None:
            return IndexedAttention if config.latent is None else IndexedLatentAttention
        if config.has_latent(index):
            return LatentAttention
        if config.beside is not None:
            return AttentionBeside
        return FeatureAttention if config.has_features(index) else MultiHeadAttention

    @property
    def index(self) -> int:
        """Return the index of the layer's weights in the stack."""
        return self.attention.layer

    def forward(self, x: Tensor, call: LayerCall) -> tuple[Tensor, LayerState | None]:
        """Return the layer's output, and its next state if the call has a state."""
        new: NewStates = {}
        y = self.block(x, self.sublayers(call, new), None if self.tokenwise else call.context.q_valid)
        return y, None if call.state is None else LayerState(**new)

    def sublayers(self, call: LayerCall, new: NewStates) -> list[SubLayer]:
        """Return the sub-layers for the block, in order; they write their next states into `new`."""
        sublayers: list[SubLayer] = [partial(self.attend, call=call, new=new)]
        if self.cross_attention is not None:
            sublayers.append(partial(self.attend_to_source, call=call, new=new))
        if self.has_feedforward:
            sublayers.append(partial(self.transform, call=call, new=new))
        return sublayers

    def attend(self, x: Tensor, call: LayerCall, new: NewStates) -> Tensor:
        """Return self-attention of x, after the tokens in the state."""
        past = call.state and call.state.self_attention
        y, new["self_attention"] = self.attention(x, call.context, call.position, past)
        return y

    def attend_to_source(self, x: Tensor, call: LayerCall, new: NewStates) -> Tensor:
        """Return cross-attention of x to the source."""
        assert self.cross_attention is not None
        assert call.source is not None
        past = call.state and call.state.cross_attention
        y, new["cross_attention"] = self.cross_attention.cross(
            x, call.source.hidden, call.source.context, past
        )
        return y

    def transform(self, x: Tensor, call: LayerCall, new: NewStates) -> Tensor:
        """Return the feed-forward of x. Most feed-forwards compute each token alone and have no state."""
        if call.state is None or not self.feedforward_has_state:
            return self.feedforward(x, call.context)
        past = call.state.feedforward or self.feedforward.new_state()
        y, new["feedforward"] = self.feedforward(x, call.context, past)
        return y

    def new_state(self, reserve: int) -> LayerState:
        """Return the state before the first token, with caches for `reserve` tokens."""
        return LayerState(self.attention.new_state(reserve), feedforward=self.feedforward.new_state())

    def rerun(self, x: Tensor, read: Tensor, context: Context, position: Position) -> Tensor:
        """Return the output of an encoder's layer for x, with keys and values from the layer input `read`."""
        key_input = self.block.pre_norm(read)
        attend = lambda x: self.attention.reading(x, key_input, context, position)  # noqa: E731
        sublayers = [attend, lambda x: self.feedforward(x, context)]
        return self.block(x, sublayers[: 1 + self.has_feedforward])
