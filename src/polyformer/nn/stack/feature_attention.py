"""What some models add to attention: gates, global tokens, a value residual; memories and tokens that halt.

`output_gate` multiplies the heads by sigmoid(x W_g) before W_o (Qiu et al. 2025, section 2; Qwen3-Next).
`head_scale` multiplies each head by a learned number, initially 1 (Shleifer et al. 2021, NormFormer).
`value_residual` replaces the values V_l of a layer after the first by a V_l + b V_1, with learned numbers a
and b, initially 1/2 (Zhou et al. 2024, ResFormer, section 3). Caches contain the sums. Mechanisms may have
gates of their own (`MechanismConfig.gate_sizes`), or share the projections of queries and keys.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

from polyformer.attention.mechanisms import MechanismConfig, SoftmaxConfig
from polyformer.attention.positions import BoundPosition, Position
from polyformer.core.errors import InputError
from polyformer.core.kv_cache import KeyValueCache
from polyformer.core.ops.linear import Linear, linears
from polyformer.core.sequence.context import Context
from polyformer.core.sequence.tokens import Reach
from polyformer.core.state import State
from polyformer.nn.depth import Active
from polyformer.nn.stack.attention_options import check_global, split_global_tokens
from polyformer.nn.stack.config import AttentionConfig
from polyformer.nn.stack.global_projections import (
    GlobalAttention,
    GlobalState,
)
from polyformer.nn.stack.multihead import MultiHeadAttention, ProjectedSource, rotate


class FeatureAttention(MultiHeadAttention):
    """Multi-head attention with the features of this module: x [B, T, E] -> [B, T, E]."""

    def __init__(self, hidden_size: int, config: AttentionConfig, layer: int = 0):
        super().__init__(hidden_size, config, layer)
        gates = config.mechanism.for_layer(layer).gate_sizes(config.num_attention_heads, self.head_size)
        # A mechanism with an output gate applies it itself, see `_gates`.
        self.gates_heads = config.output_gate and "output" not in gates
        output = gates.pop("output", self.output.in_features if self.gates_heads else 0)
        bias = self.gates_heads and config.has_bias("query")
        self.gate = Linear(hidden_size, sum(gates.values()), bias=False) if gates else None
        self.output_gate = Linear(hidden_size, output, bias=bias) if output else None

        count = self.output.in_features // self.value_size
        self.head_scales = nn.Parameter(torch.ones(count)) if config.head_scale else None
        # a and b of a value residual.
        self.value_shares = nn.Parameter(torch.full((2,), 0.5)) if config.value_residual and layer else None

    def _mechanism_config(self, hidden_size: int) -> MechanismConfig:
        """Return the configuration of the mechanism, and add the projections of global tokens."""
        config, mechanism = self.config, super()._mechanism_config(hidden_size)
        if config.global_projections:
            check_global(mechanism)
            assert isinstance(mechanism, SoftmaxConfig)
            self.global_attention = GlobalAttention(hidden_size, config, self.layer, mechanism)
            # For the mechanism, global tokens are only keys that all queries see.
            mechanism = dataclasses.replace(mechanism, pattern=split_global_tokens(mechanism.pattern)[0])
        return mechanism

    def new_state(self, reserve: int) -> State | None:
        """Return the state before the first token, with a cache for `reserve` tokens, or None."""
        state = self.mechanism.new_state(reserve)
        if self.global_attention is None or state is None:
            return state
        return GlobalState(state, KeyValueCache(reserve=reserve))

    def reach(self) -> Reach | None:
        """Return which earlier keys of its cache a query may read; None for all."""
        return self.mechanism.reach() if self.global_attention is None else None

    def forward(
        self,
        x: Tensor,
        context: Context,
        position: Position,
        state: State | None = None,
        *,
        read: Tensor | None = None,
        memory: Tensor | None = None,
        mix: Callable[[Tensor, Tensor], Tensor] | None = None,
        active: Active | None = None,
        first_values: Tensor | None = None,
    ) -> tuple[Tensor, State | None]:
        """Return the self-attention of x, after the tokens in `state`, and the state that includes x.

        read: the input of keys and values of the same tokens, if it is not x itself. memory: [B, M, E], the
        input of keys and values of a memory's tokens, which are the first M keys. mix: a function of the
        mechanism's output and of the queries before positions, [B, H, T, D] each, that returns the input of
        the output projection. active: the places of the tokens x [1, N, E] among all of `read`. first_values:
        the first layer's values of `read`, for a value residual.
        """
        read = x if read is None else read
        if memory is not None:
            read = torch.cat([memory.to(read.dtype), read], 1)
        source = self._query_input(x)
        q, k, v = self._projected_features(x, source, read, active)
        v = self._with_first(v, first_values)
        if self.global_attention is not None:
            past = state if isinstance(state, GlobalState) else None
            return self._with_global_tokens(x, read, (q, k, v), context, position, past)
        # A store is searched by content, so `mix` gets the queries before rotation.
        if self.own_heads:
            y, new = self._attend(
                q, k, v, context, state, BoundPosition(position, self._site()), *self._gates(x, source, read)
            )
        else:
            y, new = self.attend(q, k, v, context, position, state, *self._gates(x, source, read))
        return self._merge_active(y if mix is None else mix(y, q), x, active), new

    def reading(self, x: Tensor, read: Tensor, context: Context, position: Position) -> Tensor:
        """Return the attention of x [B, T, E] with keys and values from `read`, of the same tokens."""
        return self.forward(x, context, position, read=read)[0]

    def cross(
        self,
        x: Tensor,
        source: Tensor | None,
        context: Context,
        state: State | None = None,
        active: Active | None = None,
    ) -> tuple[Tensor, ProjectedSource]:
        """Return attention of x [B, T, E] to source [B, S, E], and the projected source, to reuse as `state`.

        active: as for `forward`.
        """
        state = self.project_source(source, state)
        y, _ = self.mechanism(self._active_queries(x, active), state.keys, state.values, context, None, None)
        return self._merge_active(y, x, active), state

    def extended(
        self,
        read: Tensor,
        context: Context,
        position: Position,
        state: State,
        first_values: Tensor | None = None,
    ) -> State:
        """Return the state that includes tokens [B, T, E] for which no queries are computed."""
        k, v = self._cached(read)
        v = self._with_first(v, first_values)
        # Rotation takes queries and keys together; these queries are not used.
        q = k.new_zeros(len(k), self.config.num_attention_heads, *k.shape[2:])
        return self.mechanism.extended(state, rotate(q, k, context, position, self._site())[1], v)

    def _with_global_tokens(
        self,
        x: Tensor,
        read: Tensor,
        heads: tuple[Tensor, Tensor, Tensor],
        context: Context,
        position: Position,
        state: GlobalState | None,
    ) -> tuple[Tensor, GlobalState | None]:
        """Return attention with separate projections of global tokens, and the next state."""
        assert self.global_attention is not None
        y, own = self.attend(*heads, context, position, state and state.ordinary)
        y, cache = self.global_attention(y, x, read, context, position, state and state.cache)
        new = None if own is None or cache is None else GlobalState(own, cache)
        return self._merge_active(y, x, None), new

    def _query_input(self, x: Tensor) -> Tensor:
        """Return the input of the projection of queries, x [B, T, E] itself."""
        return x

    def _projected_features(
        self, x: Tensor, source: Tensor, read: Tensor, active: Active | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries of x, from `source`, and the cached tensors of `read`, all before positions."""
        if read is x and self.key is not None:
            return self._projected(x)
        return self._active_queries(source, active), *self._cached(read)

    def _cached(self, read: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cached tensors of [B, T, E], before positions: keys and values."""
        return self.keys_and_values(read)

    def _with_first(self, values: Tensor, first_values: Tensor | None) -> Tensor:
        """Return the sum of a layer's values and the first layer's values, if it has a value residual."""
        if self.value_shares is None:
            return values
        if first_values is None:
            raise InputError(
                "value_residual: this head runs the last layer again, without the first layer's values; "
                "set it to false"
            )
        own, of_first = self.value_shares
        return own * values + of_first * first_values

    def content_attention(self, x: Tensor, read: Tensor) -> tuple[Tensor, Tensor]:
        """Return attention of x [B, T, E] to all of `read` [B, M, E] without positions: outputs [B, H, T, D]
        and weights [B, H, T, M]."""
        q, (k, v) = self._queries(x), self.keys_and_values(read)
        groups = q.shape[1] // k.shape[1]
        # Each key head serves a group of query heads.
        k, v = (y.repeat_interleave(groups, 1) for y in (k, v))
        # softmax(q k^T / sqrt(D)) v without a mask: a memory has no future tokens.
        weights = (q @ k.mT * self.head_size**-0.5).softmax(-1)
        return weights @ v, weights

    def _gates(self, x: Tensor, source: Tensor, read: Tensor) -> tuple[Tensor, ...]:
        """Return the gates [B, T, C] of a mechanism with gates, its output gate last.

        x, read: the inputs of queries and of keys. source: of the projection of queries (`_query_input`).
        """
        output = None if self.gates_heads else self.output_gate
        layers = [layer for layer in (self.gate, output) if layer is not None]
        return (torch.cat(list(linears(read, layers)), -1),) if layers else ()

    def _active_queries(self, source: Tensor, active: Active | None) -> Tensor:
        """Return the queries [B, H, T, D] of their input [B, T, E], or of that of active tokens [1, N, E]."""
        q = self.query(source)
        return self._heads(q if active is None else active.scatter_to_zeros(q), self.query_norm)

    def _merge_active(self, heads: Tensor, x: Tensor, active: Active | None) -> Tensor:
        """Return the output projection of the heads [B, H, T, D], for the tokens x: all or the active."""
        if self.head_scales is not None:
            heads = heads * self.head_scales.view(-1, 1, 1).to(heads.dtype)
        y = heads.transpose(1, 2).flatten(2)
        y = y if active is None else active.gather(y)
        if self.gates_heads and self.output_gate is not None:
            y = y * self.output_gate(x).sigmoid()
        return self.output(y)
