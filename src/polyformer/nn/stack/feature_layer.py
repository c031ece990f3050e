"""What some models add to a layer: a memory of earlier segments, tokens that halt, a value residual.

A stack has `FeatureLayer` instead of `Layer` if its configuration has any of them.
"""

import dataclasses
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from polyformer.core.parts import own_attributes, unbound
from polyformer.nn.depth import Active
from polyformer.nn.stack.config import AttentionConfig, StackConfig
from polyformer.nn.stack.feature_attention import FeatureAttention
from polyformer.nn.stack.layer import Layer, LayerCall, LayerState, NewStates

M = TypeVar("M", bound=nn.Module)


class FeatureLayer(Layer):
    """A layer with a memory, with tokens that halt, or with a value residual."""

    attention: FeatureAttention
    cross_attention: FeatureAttention | None

    def __init__(
        self, hidden_size: int, config: StackConfig, cross: AttentionConfig | None = None, index: int = 0
    ):
        super().__init__(hidden_size, config, cross, index)
        tokenwise = config.feedforward.for_layer(index).tokenwise
        self.can_skip_queries = config.attention.can_skip_queries(index) and tokenwise

    def attention_class(self, config: AttentionConfig, index: int) -> type[FeatureAttention]:
        """Return the class of an attention of this layer, which accepts memories and active tokens."""
        kind = super().attention_class(config, index)
        return kind if issubclass(kind, FeatureAttention) else FeatureAttention

    def forward(
        self, x: Tensor, call: LayerCall, active: Active | None = None
    ) -> tuple[Tensor, LayerState | None]:
        """Return the layer's output, and its next state if the call has a state.

        active: the tokens for which the output is computed, [1, N, E], or None for all; the other tokens are
        attended to with their values in x.
        """
        new: NewStates = {}
        # Parts that need all tokens run on all; the active tokens are selected afterwards.
        if active is None or not self.can_skip_queries:
            y = self.block(x, self.sublayers(call, new), None if self.tokenwise else call.context.q_valid)
            y = y if active is None else active.gather(y)
        elif len(active):  # queries and the feed-forward are computed only for active tokens
            some = dataclasses.replace(call, active=active, all_tokens=x)
            y = self.block(active.gather(x), self.sublayers(some, new))
        else:
            # All tokens have halted, but later tokens need their keys and values in the cache.
            y, new = active.gather(x), self._states_of_halted(x, call)
        if call.state is None:
            return y, None
        return y, dataclasses.replace(self.memory_state(self.block.memory_input(x), call), **new)

    def attend(self, x: Tensor, call: LayerCall, new: NewStates) -> Tensor:
        """Return self-attention of x, after the memory or the tokens in the state."""
        state, memory = call.state, call.memory
        past = state and state.self_attention
        # Keys and values are of all tokens, even if queries are only of active tokens.
        read = None if call.all_tokens is None else self.block.pre_norm(call.all_tokens)
        past_input = memory.past_inputs(state.memory) if memory and state and state.memory else None
        # A memory keeps inputs of the layer, so the norm of a pre-norm block is still to be applied.
        past_input = None if past_input is None else self.block.pre_norm_memory(past_input)
        mix = None
        if memory and state and state.store is not None:
            mix = partial(memory.mix_with_store, store=state.store, context=call.context)
        y, new["self_attention"] = self.attention(
            x,
            call.context,
            call.position,
            past,
            read=read,
            memory=past_input,
            mix=mix,
            active=call.active,
            first_values=call.first_values,
        )
        return y

    def attend_to_source(self, x: Tensor, call: LayerCall, new: NewStates) -> Tensor:
        """Return cross-attention of x to the source."""
        assert self.cross_attention is not None
        assert call.source is not None
        past, source = call.state and call.state.cross_attention, call.source
        y, new["cross_attention"] = self.cross_attention.cross(
            x, source.hidden, source.context, past, call.active
        )
        return y

    def transform(self, x: Tensor, call: LayerCall, new: NewStates) -> Tensor:
        """Return the feed-forward of x; active tokens [1, N, E] have no context."""
        return super().transform(x, call, new) if call.active is None else self.feedforward(x, None)

    def _states_of_halted(self, x: Tensor, call: LayerCall) -> NewStates:
        """Return the next states if no token of x [B, T, E] is computed; later tokens see all of x."""
        new: NewStates = {}
        state, source = call.state, call.source
        if state is None:
            return new
        if state.self_attention is not None:
            read = self.block.pre_norm(x)
            new["self_attention"] = self.attention.extended(
                read, call.context, call.position, state.self_attention, call.first_values
            )
        if self.cross_attention is not None and source is not None:
            new["cross_attention"] = self.cross_attention.project_source(source.hidden, state.cross_attention)
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


def detached(module: M) -> M:
    """Return the module with weights that get no gradient; memory and hooks of submodules are shared."""
    weights = {name: None if x is None else x.detach() for name, x in module._parameters.items()}
    parts = {name: None if part is None else detached(part) for name, part in module._modules.items()}
    kind: Any = type(unbound(module))
    twin = kind.__new__(kind)
    own = own_attributes(module)
    object.__setattr__(twin, "__dict__", {**own, "_parameters": weights, "_modules": parts})
    return twin
