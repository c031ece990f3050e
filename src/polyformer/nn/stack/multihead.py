"""Multi-head attention: project to heads, apply a mechanism to them, and project back.

    head_i = mechanism(x W_q^i, s W_k^i, s W_v^i);  y = concat(head_1 .. head_h) W_o

s is x itself (self-attention) or another sequence (cross-attention). With fewer key heads than query heads,
each group of query heads shares a key head (Ainslie et al. 2023). Vaswani et al. 2017, section 3.2.2.

`qk_norm` normalizes queries and keys before their positions, so that scores stay bounded: each head's vector
(Henry et al. 2020; Qwen3, Gemma 3) or the whole projection before it is split into heads (OLMo 2).
`output_gate` multiplies the heads by sigmoid(x W_g) before W_o (Qiu et al. 2025, section 2; Qwen3-Next).
`value_residual` replaces the values V_l of a layer after the first by a V_l + b V_1, with learned numbers a
and b, initially 1/2 (Zhou et al. 2024, ResFormer, section 3). Caches contain the sums.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.attention.functional.request import score_scale
from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.positions import BoundPosition, Position, Site
from polyformer.core.errors import InputError
from polyformer.core.kv_cache import KeyValueCache, PairCache
from polyformer.core.ops.linear import Linear, linears
from polyformer.core.sequence.context import Context
from polyformer.core.sequence.reach import Reach
from polyformer.core.state import State
from polyformer.nn.cache import CacheCall, CompressedCache
from polyformer.nn.depth import Active
from polyformer.nn.stack.attention_config import AttentionConfig
from polyformer.nn.stack.global_projections import (
    GlobalAttention,
    GlobalState,
    check_global,
    site_of,
    split_global_tokens,
    split_heads,
)


def rotate(q: Tensor, k: Tensor, context: Context, position: Position, site: Site) -> tuple[Tensor, Tensor]:
    """Return q and the new keys k rotated by their positions; the keys of a memory come first."""
    past = k.shape[2] - q.shape[2]
    if not past:
        return position.rotate(q, k, context, site)
    # Schemes rotate equal numbers of queries and keys, so the queries are padded by the memory's length.
    q, k = position.rotate(F.pad(q, (0, 0, past, 0)), k, context.all_as_queries, site)
    return q[:, :, past:], k


@dataclasses.dataclass(frozen=True)
class ProjectedSource(State):
    """The keys and values of a cross-attention's source, projected once: [B, Hkv, S, D] each."""

    keys: Tensor
    values: Tensor

    def truncated_(self, count: int) -> "ProjectedSource":
        """Return the state itself: the source is independent of the tokens of the target."""
        return self


class MultiHeadAttention(nn.Module):
    """Multi-head attention with its projections: x [B, T, E] -> [B, T, E]."""

    def __init__(self, hidden_size: int, config: AttentionConfig, layer: int = 0):
        super().__init__()
        self.config, self.layer = config, layer
        self.head_size = config.width(hidden_size)
        mechanism = config.mechanism.for_layer(layer)
        self._add_projections(hidden_size)
        self.global_attention: GlobalAttention | None = None
        if config.global_projections:
            check_global(mechanism)
            assert isinstance(mechanism, SoftmaxConfig)
            self.global_attention = GlobalAttention(
                hidden_size,
                self.head_size,
                config.num_attention_heads,
                config.kv_heads,
                config.has_bias("query"),
                layer,
                mechanism,
            )
            # For the mechanism, global tokens are only keys that all queries see.
            mechanism = dataclasses.replace(mechanism, pattern=split_global_tokens(mechanism.pattern)[0])
        self.mechanism = mechanism.build(config.num_attention_heads, self.head_size)
        gates = mechanism.gate_sizes(config.num_attention_heads, self.head_size)
        # A mechanism with an output gate applies it itself, see `_gates`.
        self.gates_heads = config.output_gate and "output" not in gates
        output = gates.pop("output", self.output.in_features if self.gates_heads else 0)
        bias = self.gates_heads and config.has_bias("query")
        self.gate = Linear(hidden_size, sum(gates.values()), bias=False) if gates else None
        self.output_gate = Linear(hidden_size, output, bias=bias) if output else None

        # a and b of a value residual.
        self.value_shares = nn.Parameter(torch.full((2,), 0.5)) if config.value_residual and layer else None

    def _add_projections(self, hidden_size: int) -> None:
        """Add the projections, and the norms of queries and keys."""
        config, mechanism = self.config, self.config.mechanism.for_layer(self.layer)
        # With H query heads and Hkv key heads of width D: W_q [E, H D], W_k and W_v [E, Hkv D], W_o [H D, E].
        heads = mechanism.projected_heads(config.num_attention_heads, config.kv_heads, self.head_size)
        self.head_size, self.value_size, self.own_heads = heads.key_size, heads.value_size, heads.own
        inner, inner_kv = heads.queries * heads.key_size, heads.keys * heads.key_size
        inner_values = heads.values * heads.value_size
        self.query = Linear(hidden_size, inner, bias=config.has_bias("query"))
        # LSH attention uses the queries as keys, and then there is no key projection.
        shared = mechanism.shares_queries
        self.key = None if shared else Linear(hidden_size, inner_kv, bias=config.has_bias("key"))
        self.value = Linear(hidden_size, inner_values, bias=config.has_bias("value"))
        width = inner_values if heads.own else inner
        self.output = Linear(width, hidden_size, bias=config.has_bias("output"))
        widths = (inner, inner_kv) if config.qk_norm_of == "projection" else (self.head_size,) * 2
        norm = None if heads.own else config.qk_norm
        self.query_norm, self.key_norm = (norm and norm.build(width) for width in widths)

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
        q, k, v = self._projected(x, read, active)
        v = self._with_first(v, first_values)
        # A store is searched by content, so `mix` gets the queries before rotation.
        unrotated = q
        if position.rotates and not self.own_heads:
            q, k = rotate(q, k, context, position, self._site())
        without = position.is_plain and not self.mechanism.reads_plain_positions
        terms = None if without else BoundPosition(position, self._site())
        if self.global_attention is None:
            if isinstance(state, CompressedCache):
                bound = terms or BoundPosition(position, self._site())
                y, new = self._compressed(q, unrotated, k, v, context, bound, state)
            else:
                y, new = self._attend(q, k, v, context, state, terms, *self._gates(read))
            return self._merge_heads(y if mix is None else mix(y, unrotated), x, active), new
        past = state if isinstance(state, GlobalState) else None
        y, own = self.mechanism(q, k, v, context, past.ordinary if past else None, terms)
        y, cache = self.global_attention(y, x, read, context, position, past.cache if past else None)
        return self._merge_heads(y, x), None if own is None or cache is None else GlobalState(own, cache)

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

    def _projected(self, x: Tensor, read: Tensor, active: Active | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries of x, and the cached tensors of `read`, all before positions."""
        # With packed or int8 weights, `linears` computes the three projections as a single product.
        if read is x and self.key is not None:
            q, k, v = linears(x, (self.query, self.key, self.value))
            q, k = self._heads(q, self.query_norm), self._heads(k, self.key_norm)
            return q, k, split_heads(v, self.value_size)
        return self._queries(x, active), *self._cached(read)

    def _cached(self, read: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cached tensors of [B, T, E], before positions: keys and values."""
        return self.keys_and_values(read)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, context: Context, state: State | None, *terms: Any
    ) -> tuple[Tensor, State | None]:
        """Return attention [B, H, Tq, Dv] to the state's and the new k and v, and the next state."""
        return self.mechanism(q, k, v, context, state, *terms)

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

    def keys_and_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of x [B, T, E], before positions: [B, Hkv, T, D] each."""
        return self._heads((self.key or self.query)(x), self.key_norm), split_heads(
            self.value(x), self.value_size
        )

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
        y, _ = self.mechanism(self._queries(x, active), state.keys, state.values, context, None, None)
        return self._merge_heads(y, x, active), state

    def project_source(self, source: Tensor | None, state: State | None = None) -> ProjectedSource:
        """Return keys and values of source [B, S, E], or `state` if it has them already."""
        if isinstance(state, ProjectedSource):
            return state
        assert source is not None
        return ProjectedSource(*self.keys_and_values(source))

    def _compressed(
        self,
        q: Tensor,
        unrotated: Tensor,
        k: Tensor,
        v: Tensor,
        context: Context,
        terms: BoundPosition,
        state: CompressedCache,
    ) -> tuple[Tensor, CompressedCache]:
        """Return the mechanism's output with a policy's cache, and the state after the policy's choice."""
        assert isinstance(self.config.mechanism, SoftmaxConfig)
        position, site = terms.position, terms.site
        distances = state.distances(terms, k) if position.adds_bias else None
        # Before any key is dropped all heads have the same distances.
        kept_terms = terms if distances is None or state.kept is None else distances
        y, cache = self.mechanism(q, k, v, context, state.cache, kept_terms)
        assert isinstance(cache, PairCache)
        scale = score_scale(self.config.mechanism.scale, self.head_size)
        turn = lambda x, context: position.rotate(x, x, context, site)[0]  # noqa: E731
        mod = None if distances is None else distances.score_mod(q, k, context)
        return y, state.after(CacheCall(q, unrotated, cache, context, scale, turn, mod))

    def _gates(self, read: Tensor) -> tuple[Tensor, ...]:
        """Return the gates [B, T, C] of a mechanism with gates, its output gate last."""
        output = None if self.gates_heads else self.output_gate
        layers = [layer for layer in (self.gate, output) if layer is not None]
        return (torch.cat(list(linears(read, layers)), -1),) if layers else ()

    def _site(self) -> Site:
        """Return the layer and its projections, for position schemes that use them."""
        heads = self.config.num_attention_heads
        return site_of(self.layer, self.query, self.key or self.query, self.head_size, heads)

    def _queries(self, x: Tensor, active: Active | None = None) -> Tensor:
        """Return the queries [B, H, T, D] of x [B, T, E], or of its active tokens [1, N, E]."""
        q = self.query(x)
        return self._heads(q if active is None else active.scatter_to_zeros(q), self.query_norm)

    def _heads(self, projected: Tensor, norm: nn.Module | None = None) -> Tensor:
        """Return a projection [B, T, H D] as heads [B, H, T, D], normalized by `norm`."""
        if norm is not None and self.config.qk_norm_of == "projection":
            projected = norm(projected)
        elif norm is not None:
            projected = norm(projected.unflatten(-1, (-1, self.head_size))).flatten(-2)
        return split_heads(projected, self.head_size)

    def _merge_heads(self, heads: Tensor, x: Tensor, active: Active | None = None) -> Tensor:
        """Return the output projection of the heads [B, H, T, D], for the tokens x: all or the active."""
        # [B, H, T, D] -> [B, T, H, D] -> [B, T, H D], the concatenation of the heads.
        y = heads.transpose(1, 2).flatten(2)
        y = y if active is None else active.gather(y)
        if self.gates_heads and self.output_gate is not None:
            y = y * self.output_gate(x).sigmoid()
        return self.output(y)
