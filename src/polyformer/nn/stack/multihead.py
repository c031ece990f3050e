"""Multi-head attention: project to heads, apply a mechanism to them, and project back.

    head_i = mechanism(x W_q^i, s W_k^i, s W_v^i);  y = concat(head_1 .. head_h) W_o

s is x itself (self-attention) or another sequence (cross-attention). With fewer key heads than query heads,
each group of query heads shares a key head (Ainslie et al. 2023). Vaswani et al. 2017, section 3.2.2.

`qk_norm` normalizes queries and keys before their positions, so that scores stay bounded: each head's vector
(Henry et al. 2020; Qwen3, Gemma 3) or the whole projection before it is split into heads (OLMo 2). Gates,
global tokens and what else some models add to attention is in `FeatureAttention`.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.attention.functional.request import score_scale
from polyformer.attention.mechanisms import Mechanism, MechanismConfig, SoftmaxConfig
from polyformer.attention.positions import BoundPosition, Position, Site
from polyformer.core.errors import InputError
from polyformer.core.ops.linear import Linear, joined, joint_linear, linears
from polyformer.core.parts import submodule
from polyformer.core.sequence.context import Context
from polyformer.core.sequence.tokens import Reach
from polyformer.core.state import State
from polyformer.nn.cache import CompressedCache
from polyformer.nn.stack.config import AttentionConfig


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


def split_heads(x: Tensor, head_size: int) -> Tensor:
    """Return [B, T, H D] as heads [B, H, T, D]."""
    # The last axis is H D with the head first, so a view splits it.
    rows, length, width = x.shape
    return x.view(rows, length, width // head_size, head_size).transpose(1, 2)


def split_projections(joint: Tensor, count: int, head_size: int) -> tuple[Tensor, ...]:
    """Return `count` projections side by side, [B, T, count H D], as heads [B, H, T, D] each."""
    rows, length, width = joint.shape
    heads = joint.view(rows, length, count, width // (count * head_size), head_size)
    return heads.permute(2, 0, 3, 1, 4).unbind()


def site_of(layer: int, query: nn.Module, key: nn.Module, head_size: int, heads: int) -> Site:
    """Return the layer and its projections of vectors that are not tokens, for position schemes."""

    def project(projection: nn.Module, vectors: Tensor) -> Tensor:
        # [R, E] -> [R, heads, D] -> [heads, R, D]; a key head serves a group of query heads.
        own = projection(vectors).unflatten(-1, (-1, head_size)).transpose(0, 1)
        return own.repeat_interleave(heads // len(own), dim=0)

    return Site(layer, partial(project, query), partial(project, key))


class MultiHeadAttention(nn.Module):
    """Multi-head attention with its projections: x [B, T, E] -> [B, T, E]."""

    query: Linear = submodule()
    key: Linear | None = submodule()
    value: Linear = submodule()
    output: Linear = submodule()
    mechanism: Mechanism = submodule()

    def __init__(self, hidden_size: int, config: AttentionConfig, layer: int = 0):
        super().__init__()
        if type(self) is MultiHeadAttention and config.has_features(layer):
            raise InputError(
                "config: MultiHeadAttention is plain, and this configuration has gates, global projections, "
                "a value residual, latents or a mechanism with other projections; build FeatureAttention, "
                "or LatentAttention for latents"
            )
        self.config, self.layer = config, layer
        self.head_size = config.width(hidden_size)
        self.global_attention: nn.Module | None = None
        self._add_projections(hidden_size)
        self.mechanism = self._built_mechanism(self._mechanism_config(hidden_size))

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
        width = inner_values // heads.steps if heads.own else inner
        self.output = Linear(width, hidden_size, bias=config.has_bias("output"))
        widths = (inner, inner_kv) if config.qk_norm_of == "projection" else (self.head_size,) * 2
        norm = None if heads.own else config.qk_norm
        self.query_norm, self.key_norm = (norm and norm.build(width) for width in widths)
        sizes = {
            (heads.queries, heads.key_size),
            (heads.keys, heads.key_size),
            (heads.values, heads.value_size),
        }
        self.has_equal_heads = norm is None and len(sizes) == 1

    def _mechanism_config(self, hidden_size: int) -> MechanismConfig:
        """Return the configuration of the layer's mechanism."""
        return self.config.mechanism.for_layer(self.layer)

    def _built_mechanism(self, config: MechanismConfig) -> Mechanism:
        """Return the mechanism of this configuration for the layer's heads."""
        return config.build(self.config.num_attention_heads, self.head_size)

    def forward(
        self, x: Tensor, context: Context, position: Position, state: State | None = None
    ) -> tuple[Tensor, State | None]:
        """Return the self-attention of x, after the tokens in `state`, and the state that includes x."""
        q, k, v = self._projected(x)
        y, state = self.attend(q, k, v, context, position, state)
        return self._merge_heads(y), state

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: Context,
        position: Position,
        state: State | None,
        *gates: Tensor,
    ) -> tuple[Tensor, State | None]:
        """Return attention [B, H, Tq, Dv] of heads before positions, and the next state."""
        unrotated, mechanism = q, self.mechanism
        if position.rotates:
            q, k = rotate(q, k, context, position, self._site())
        if isinstance(state, CompressedCache):
            assert isinstance(self.config.mechanism, SoftmaxConfig)
            scale = score_scale(self.config.mechanism.scale, self.head_size)
            terms = BoundPosition(position, self._site())
            return state.attend(mechanism, scale, (q, unrotated), (k, v), context, terms)
        plain = position.is_plain and not mechanism.reads_plain_positions
        terms = None if plain else BoundPosition(position, self._site())
        return self._attend(q, k, v, context, state, terms, *gates)

    def reading(self, x: Tensor, read: Tensor, context: Context, position: Position) -> Tensor:
        """Return the attention of x [B, T, E] with keys and values from `read`, of the same tokens."""
        y, _ = self.attend(self._queries(x), *self.keys_and_values(read), context, position, None)
        return self._merge_heads(y)

    def cross(
        self, x: Tensor, source: Tensor | None, context: Context, state: State | None = None
    ) -> tuple[Tensor, ProjectedSource]:
        """Return attention of x [B, T, E] to source [B, S, E], and the projected source, the next `state`."""
        state = self.project_source(source, state)
        y, _ = self.mechanism(self._queries(x), state.keys, state.values, context, None, None)
        return self._merge_heads(y), state

    def project_source(self, source: Tensor | None, state: State | None = None) -> ProjectedSource:
        """Return keys and values of source [B, S, E], or `state` if it has them already."""
        if isinstance(state, ProjectedSource):
            return state
        assert source is not None
        return ProjectedSource(*self.keys_and_values(source))

    def keys_and_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of x [B, T, E], before positions: [B, Hkv, T, D] each."""
        key = self.key or self.query
        joint = joint_linear(x, (key, self.value)) if self.has_equal_heads else None
        if joint is not None:
            k, v = split_projections(joint, 2, self.head_size)
            return k, v
        return self._heads(key(x), self.key_norm), split_heads(self.value(x), self.value_size)

    def new_state(self, reserve: int) -> State | None:
        """Return the state before the first token, with a cache for `reserve` tokens, or None."""
        return self.mechanism.new_state(reserve)

    def reach(self) -> Reach | None:
        """Return which earlier keys of its cache a query may read; None for all."""
        return self.mechanism.reach()

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of x, before positions."""
        key = self.key
        assert key is not None
        layers = self.query, key, self.value
        joint = joint_linear(x, layers) if self.has_equal_heads else None
        if joint is not None:
            q, k, v = split_projections(joint, 3, self.head_size)
            return q, k, v
        # With packed or int8 weights, `linears` computes the three projections as a single product.
        q, k, v = linears(x, layers)
        if self.query_norm is not None:
            return (
                self._heads(q, self.query_norm),
                self._heads(k, self.key_norm),
                split_heads(v, self.value_size),
            )
        size = self.head_size
        return split_heads(q, size), split_heads(k, size), split_heads(v, self.value_size)

    def bound_parts(self) -> dict[str, Any]:
        """Return the projection of small layers while they are bound: a single product."""
        for name in ("_projected", "_add_projections"):
            if getattr(type(self), name) is not getattr(MultiHeadAttention, name):
                return {}
        key = self.key
        joint = joined([self.query, key, self.value]) if self.has_equal_heads and key is not None else None
        return {} if joint is None else {"_projected": partial(self._split, joint)}

    def _split(self, joint: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, ...]:
        return split_projections(joint(x), 3, self.head_size)

    def _queries(self, x: Tensor) -> Tensor:
        """Return the queries [B, H, T, D] of x [B, T, E]."""
        return self._heads(self.query(x), self.query_norm)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, context: Context, state: State | None, *terms: Any
    ) -> tuple[Tensor, State | None]:
        """Return attention [B, H, Tq, Dv] to the state's and the new k and v, and the next state."""
        return self.mechanism(q, k, v, context, state, *terms)

    def _site(self) -> Site:
        """Return the layer and its projections, for position schemes that use them."""
        heads = self.config.num_attention_heads
        return site_of(self.layer, self.query, self.key or self.query, self.head_size, heads)

    def _heads(self, projected: Tensor, norm: nn.Module | None = None) -> Tensor:
        """Return a projection [B, T, H D] as heads [B, H, T, D], normalized by `norm`."""
        if norm is not None and self.config.qk_norm_of == "projection":
            projected = norm(projected)
        elif norm is not None:
            projected = norm(projected.unflatten(-1, (-1, self.head_size))).flatten(-2)
        return split_heads(projected, self.head_size)

    def _merge_heads(self, heads: Tensor) -> Tensor:
        """Return the output projection of the heads [B, H, T, D]."""
        # [B, H, T, D] -> [B, T, H, D] -> [B, T, H D], the concatenation of the heads.
        return self.output(heads.transpose(1, 2).flatten(2))
