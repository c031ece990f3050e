"""Multi-head latent attention: keys and values of all heads are projections of one latent per token.

    [r_j; c_j] = s_j W_c          r_j: part of the keys of all heads; c_j: the latent, normalized
    k_j^i = [R_j r_j; c_j U^i]    R_j: the rotation of position j (RoPE)
    v_j^i = c_j V^i
    q_j^i = [R_j a; b]            [a; b] = x_j W_q^i, or norm(x_j W_a) W_q^i with a latent of queries

This is the explicit form. Only [R_j r_j; c_j] is cached, D_r + D_c numbers per token, and not H (D + D_v). A
few queries read it without computing keys and values (absorbed form):

    b . (c_j U^i) = (b U^i^T) . c_j          sum_j p_j (c_j V^i) = (sum_j p_j c_j) V^i

They attend to one key head [R_j r_j; c_j] with the values c_j. The mechanism is softmax attention in both
forms, so patterns, sinks, soft caps, biases by distance and dropout are the same. `_absorbs` compares the
products of both.

DeepSeek-AI 2024 (DeepSeek-V2), section 2.1; norms of the latents: section 3.1.2. In each head rotated
channels come first here, and last in the paper.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.core.kv_cache import appended
from polyformer.core.ops.linear import Linear
from polyformer.core.ops.quantized import weight_of
from polyformer.core.sequence.context import Context
from polyformer.core.state import State
from polyformer.nn.stack.config import AttentionConfig
from polyformer.nn.stack.feature_attention import FeatureAttention
from polyformer.nn.stack.multihead import split_heads


class LatentAttention(FeatureAttention):
    """Latent attention with its projections: x [B, T, E] -> [B, T, E].

    A head's queries have D_r rotated channels and D others. A state is a KV cache of keys [R_j r_j; c_j], as
    of one head, and of values without channels.
    """

    def __init__(self, hidden_size: int, config: AttentionConfig, layer: int = 0):
        assert config.latent is not None
        # The other layers of a stack may have recurrences.
        mechanism = config.mechanism.for_layer(layer)
        assert isinstance(mechanism, SoftmaxConfig)
        self.form, self.content = config.latent.form, config.width(hidden_size)
        self.rotary, self.latent_size, self.value_size = config.latent.widths(self.content)
        if mechanism.scale is None:
            # By default the mechanism would scale absorbed queries by their own width.
            mechanism = dataclasses.replace(mechanism, scale=(self.rotary + self.content) ** -0.5)
        config = dataclasses.replace(config, mechanism=mechanism)
        super().__init__(hidden_size, config, layer)

    def _add_projections(self, hidden_size: int) -> None:
        """Add the projections to latents and from latents, and the norms of the latents."""
        config, heads = self.config, self.config.num_attention_heads
        assert config.latent is not None
        self.head_size = self.rotary + self.content
        width, biased = config.latent.query_size, config.has_bias("query")
        self.query_latent = None if width is None else Linear(hidden_size, width, bias=biased)
        self.query_latent_norm = None if width is None else config.latent.norm.build(width)
        inner = heads * self.head_size
        self.query = Linear(width or hidden_size, inner, bias=biased and width is None)
        self.latent = Linear(hidden_size, self.rotary + self.latent_size, bias=config.has_bias("key"))
        self.latent_norm = config.latent.norm.build(self.latent_size)
        self.up = Linear(self.latent_size, heads * (self.content + self.value_size), bias=False)
        self.output = Linear(heads * self.value_size, hidden_size, bias=config.has_bias("output"))
        self.key = self.query_norm = self.key_norm = None
        self.own_heads = False

    def keys_and_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of x [B, T, E], before positions: [B, H, T, D_r + D] and [B, H, T, D_v]."""
        return self._expanded(self._latents(x))

    def _queries(self, x: Tensor) -> Tensor:
        """Return the queries [B, H, T, D_r + D] of x [B, T, E]."""
        return self._active_queries(self._query_input(x), None)

    def _query_input(self, x: Tensor) -> Tensor:
        """Return the input of the projection of queries: the latent of queries, or x [B, T, E] itself."""
        if self.query_latent is None or self.query_latent_norm is None:
            return x
        return self.query_latent_norm(self.query_latent(x))

    def _cached(self, read: Tensor) -> tuple[Tensor, Tensor]:
        """Return the latents [B, 1, T, D_r + D_c], before positions, and values without channels."""
        latents = self._latents(read)
        return latents, latents[..., :0]

    def _latents(self, x: Tensor) -> Tensor:
        """Return [r; c] of x [B, T, E], before positions: [B, 1, T, D_r + D_c]."""
        shared, latent = self.latent(x).split([self.rotary, self.latent_size], -1)
        return torch.cat([shared, self.latent_norm(latent)], -1).unsqueeze(1)

    def _expanded(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys [B, H, T, D_r + D] and values [B, H, T, D_v] of latents [B, 1, T, D_r + D_c]."""
        shared, latent = latents.split([self.rotary, self.latent_size], -1)
        heads = split_heads(self.up(latent.squeeze(1)), self.content + self.value_size)
        content, values = heads.split([self.content, self.value_size], -1)
        return torch.cat([shared.expand(*content.shape[:3], -1), content], -1), values

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, context: Context, state: State | None, *terms: Any
    ) -> tuple[Tensor, State | None]:
        """Return attention of rotated queries [B, H, Tq, D_r + D] to the latents k, and the next state."""
        latents, _, new = appended(state, k, v)
        if not self._absorbs(q.shape[2], latents.shape[2]):
            keys, values = self._expanded(latents)
            return self.mechanism(q, keys, values, context, None, *terms)[0], new
        up = weight_of(self.up).unflatten(0, (-1, self.content + self.value_size))
        to_keys, to_values = up.split([self.content, self.value_size], 1)  # [H, D, D_c] and [H, D_v, D_c]
        q = torch.cat([q[..., : self.rotary], q[..., self.rotary :] @ to_keys], -1)
        # Values of the width of the keys have fused kernels: the weighted sum of shared keys is cut off.
        y = self.mechanism(q, latents, latents, context, None, *terms)[0]
        return y[..., self.rotary :] @ to_values.mT, new

    def _absorbs(self, queries: int, keys: int) -> bool:
        """Return whether the absorbed form needs fewer products; a graph of all lengths is explicit."""
        if self.form != "auto" or not isinstance(queries, int) or not isinstance(keys, int):
            return self.form == "absorbed"
        expansion = self.latent_size * (self.content + self.value_size)
        explicit = keys * expansion + queries * keys * (self.head_size + self.value_size)
        return queries * expansion + queries * keys * 2 * (self.rotary + self.latent_size) < explicit
