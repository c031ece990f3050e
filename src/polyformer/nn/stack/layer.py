"""A layer: self-attention, cross-attention if there is a source, and feed-forward, combined by a block."""

import dataclasses
import functools
from typing import TypeVar

import torch
from torch import Tensor, nn

from polyformer.attention.positions import Position
from polyformer.core.ops.norms import NormConfig
from polyformer.core.sequence.context import Context
from polyformer.core.state import State, StateOfStates
from polyformer.nn.block import BlockConfig, SubLayer
from polyformer.nn.depth import Active
from polyformer.nn.feedforward import FeedForwardConfig, NoFeedForward
from polyformer.nn.memory import Memory
from polyformer.nn.stack.attention_config import AttentionConfig
from polyformer.nn.stack.latent import LatentAttention
from polyformer.nn.stack.multihead import MultiHeadAttention

M = TypeVar("M", bound=nn.Module)


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


@dataclasses.dataclass(frozen=True, eq=False)
class LayerCall:
    """The arguments of a call of a layer, besides its input; only `state` differs between layers.

    first_values: the first layer's values [B, Hkv, T, D], for a value residual.
    """

    context: Context
    position: Position
    source: Source | None = None
    state: LayerState | None = None
    memory: Memory | None = None
    first_values: Tensor | None = None


class Layer(nn.Module):
    """A layer of a Transformer: x [B, T, E] -> [B, T, E]."""

    def __init__(
        self,
        hidden_size: int,
        attention: AttentionConfig,
        feedforward: FeedForwardConfig,
        block: BlockConfig,
        norm: NormConfig,
        dropout: float,
        cross: AttentionConfig | None,
        index: int,
    ):
        super().__init__()
        kind = MultiHeadAttention if attention.latent is None else LatentAttention
        self.attention = kind(hidden_size, attention, index)
        self.cross_attention = cross and MultiHeadAttention(hidden_size, cross, index)
        self.feedforward = feedforward.for_layer(index).build(hidden_size)
        if block.exceeds_float16:
            self.feedforward.widen()
        self.has_feedforward = not isinstance(self.feedforward, NoFeedForward)
        sublayers = 1 + (cross is not None) + self.has_feedforward
        self.block = block.for_layer(index).build(hidden_size, sublayers, norm, dropout)
        self.tokenwise = norm.tokenwise
        self.can_skip_queries = attention.can_skip_queries(index) and feedforward.for_layer(index).tokenwise

    def new_state(self, reserve: int) -> "LayerState":
        """Return the state before the first token, with caches for `reserve` tokens."""
        return LayerState(self.attention.new_state(reserve), feedforward=self.feedforward.new_state())

    def forward(
        self, x: Tensor, call: LayerCall, active: Active | None = None
    ) -> tuple[Tensor, LayerState | None]:
        """Return the layer's output, and its next state if it was given a state.

        active: the tokens for which the output is computed, [1, N, E], or None for all; the other tokens are
        attended to with their values in x.
        """
        new: dict[str, State | None] = {}
        # Parts that need all tokens run on all; the active tokens are selected afterwards.
        if active is None or not self.can_skip_queries:
            sublayers = self.sublayers(call, new)
            y = self.block(x, sublayers, None if self.tokenwise else call.context.q_valid)
            y = y if active is None else active.gather(y)
        elif len(active):  # queries and the feed-forward are computed only for active tokens
            # x has all tokens, for keys and values; the block gets the active tokens [1, N, E].
            sublayers = self.sublayers(call, new, active, x)
            y = self.block(active.gather(x), sublayers)
        else:
            # All tokens have halted, but later tokens need their keys and values in the cache.
            y, new = active.gather(x), self._states_of_halted(x, call)
        if call.state is None:
            return y, None
        own = self.memory_state(self.block.memory_input(x), call)
        new_attention = {"self_attention": new["self"], "cross_attention": new.get("cross")}
        return y, dataclasses.replace(own, **new_attention, feedforward=new.get("feedforward"))

    def _states_of_halted(self, x: Tensor, call: LayerCall) -> dict[str, State | None]:
        """Return the next states if no token of x [B, T, E] is computed; later tokens see all of x."""
        new: dict[str, State | None] = {"self": None}
        state, source = call.state, call.source
        if state is None:
            return new
        if state.self_attention is not None:
            read = self.block.pre_norm(x)
            past = state.self_attention
            new["self"] = self.attention.extended(read, call.context, call.position, past, call.first_values)
        if self.cross_attention is not None and source is not None:
            new["cross"] = self.cross_attention.project_source(source.hidden, state.cross_attention)
        return new

    def memory_state(self, segment: Tensor, call: LayerCall) -> LayerState:
        """Return only the memory and the store, after the inputs `segment` (`Block.memory_input`)."""
        state, memory = call.state, call.memory
        if memory is None or state is None:
            return LayerState()
        past, store = state.memory, state.store
        return LayerState(
            memory=None if past is None else memory.next_state(past, segment, self),
            store=None if store is None else memory.update_store(store, segment, self, call.context),
        )

    @property
    def index(self) -> int:
        """Return the index of the layer's weights in the stack."""
        return self.attention.layer

    def values(self, x: Tensor) -> Tensor:
        """Return the values [B, Hkv, T, D] of the layer's input x [B, T, E]."""
        return self.attention.keys_and_values(self.block.pre_norm(x))[1]

    def content_attention(self, x: Tensor, read: Tensor) -> tuple[Tensor, Tensor]:
        """Return the result of attention of x [B, T, E] to `read` [B, M, E], both in the form that a memory
        keeps: outputs [B, H, T, D] and weights [B, H, T, M]. Positions are ignored, and the layer's weights
        get no gradient."""
        # The compression is trained through x and `read`, not through this layer's weights.
        block = detached(self.block)
        x, read = block.pre_norm_memory(x), block.pre_norm_memory(read)
        return detached(self.attention).content_attention(x, read)

    @torch.no_grad()
    def keys_and_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, Hkv, T, D], before positions, of x [B, T, E] as a memory keeps it."""
        return self.attention.keys_and_values(self.block.pre_norm_memory(x))

    def sublayers(
        self,
        call: LayerCall,
        new: dict[str, State | None],
        active: Active | None = None,
        all_tokens: Tensor | None = None,
    ) -> list[SubLayer]:
        """Return the sub-layers for the block, in order; they write their next states into `new`.

        active: the tokens that the block is given, [1, N, E], of the layer's input `all_tokens` [B, T, E].
        """
        context, source, state, memory = call.context, call.source, call.state, call.memory
        # Keys and values are of all tokens, even if queries are only of active tokens.
        read = None if all_tokens is None else self.block.pre_norm(all_tokens)

        def attend_self(x: Tensor) -> Tensor:
            past = state.self_attention if state else None
            past_input = memory.past_inputs(state.memory) if memory and state and state.memory else None
            # A memory keeps inputs of the layer, so the norm of a pre-norm block is still to be applied.
            past_input = None if past_input is None else self.block.pre_norm_memory(past_input)
            mix = None
            if memory and state and state.store is not None:
                mix = functools.partial(memory.mix_with_store, store=state.store, context=context)
            reading = past, read, past_input, mix, active, call.first_values
            y, new["self"] = self.attention(x, context, call.position, *reading)
            return y

        def attend_source(x: Tensor) -> Tensor:
            assert self.cross_attention is not None
            assert source is not None
            past = state.cross_attention if state else None
            y, new["cross"] = self.cross_attention.cross(x, source.hidden, source.context, past, active)
            return y

        attention = [attend_self] if self.cross_attention is None else [attend_self, attend_source]

        def transform(x: Tensor) -> Tensor:
            tokens = context if active is None else None
            past = self.feedforward.new_state() if state else None
            # Most feed-forwards are tokenwise and have no state.
            if past is None:
                return self.feedforward(x, tokens)
            assert state is not None
            y, new["feedforward"] = self.feedforward(x, tokens, state.feedforward or past)
            return y

        return [*attention, transform] if self.has_feedforward else attention

    def rerun(self, x: Tensor, read: Tensor, context: Context, position: Position) -> Tensor:
        """Return the output of an encoder's layer for x, with keys and values from the layer input `read`."""
        key_input = self.block.pre_norm(read)
        attend = lambda x: self.attention(x, context, position, read=key_input)[0]  # noqa: E731
        sublayers = [attend, lambda x: self.feedforward(x, context)]
        return self.block(x, sublayers[: 1 + self.has_feedforward])


def detached(module: M) -> M:
    """Return the module with weights that get no gradient; memory and hooks of submodules are shared."""
    weights = {name: None if x is None else x.detach() for name, x in module._parameters.items()}
    parts = {name: None if part is None else detached(part) for name, part in module._modules.items()}
    twin = type(module).__new__(type(module))
    object.__setattr__(twin, "__dict__", {**module.__dict__, "_parameters": weights, "_modules": parts})
    return twin
