"""Forgetting attention: learned gates let each head forget earlier tokens, as a decay of the scores.

    p_ij = softmax_j(q_i . k_j / sqrt(D) + F_i - F_j)
    F_i = sum_(l <= i) log f_l,  f_l = sigmoid(u_h . k_l + b_h)

The gates are a function of the scores for `attend`. On a GPU a kernel of flash-linear-attention computes them
(`fused_forgetting`).
"""

import dataclasses
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.attention.functional.isolation import guarded
from polyformer.attention.mechanisms.base import MechanismConfig, PositionTerms
from polyformer.attention.mechanisms.fused_forgetting import GatedCall, explained, fused_forgetting, refusal
from polyformer.attention.mechanisms.pair_weights import CachedAttention
from polyformer.attention.patterns.base import ScoreMod
from polyformer.attention.patterns.mods import broadcasts
from polyformer.attention.patterns.score_steps import step
from polyformer.core.kv_cache import appended
from polyformer.core.ops.autograd import at_least_float32
from polyformer.core.ranges import Probability
from polyformer.core.sequence.context import Context
from polyformer.core.state import State


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForgettingConfig(MechanismConfig):
    """Forgetting attention: learned gates let each head forget earlier tokens.

    The term F_i - F_j is the log of the product of all gates after key j, so a small gate lets a head forget
    all tokens before it. Between tokens the sum counts real tokens of their document only. k_l is the key
    after its rotation, if the positions rotate.

    Deviations: the paper's gate reads the layer's input; here it reads the key as the KV cache keeps it, so
    that the cache need not keep gates. With RoPE a gate therefore depends on the position of its token too.
    Without causality, which the paper does not have, keys fade equally on both sides: -|F_i - F_j|. Cost: as
    softmax attention, and D + 1 per key for the gates, which are computed again from the cached keys.

    `gate_bias`: the first bias of the gates; sigmoid(5) = 0.993, so heads initially forget over 150 tokens.
    """

    gate_bias: float = 5.0
    dropout: Probability = 0.0  # of attention weights
    backend: str = "auto"

    kind: ClassVar[str] = "forgetting"
    paper: ClassVar[str] = "Lin et al. 2025 (Forgetting Transformer), section 3"
    supports_part_rotations: ClassVar[bool] = True
    supports_recurrence: ClassVar[bool] = True
    separate_queries: ClassVar[bool] = True

    def build(self, num_heads: int, head_size: int) -> "Forgetting":
        return Forgetting(self, num_heads, head_size)

    @classmethod
    def examples(cls) -> tuple["ForgettingConfig", ...]:
        return (cls(gate_bias=1.0),)


class Forgetting(CachedAttention):
    """Softmax attention with decay by gates [H, D], and a KV cache as state."""

    def __init__(self, config: ForgettingConfig, num_heads: int, head_size: int):
        super().__init__()
        self.config = config
        self.gate_vector = nn.Parameter(torch.zeros(num_heads, head_size))
        self.gate_bias = nn.Parameter(torch.full((num_heads,), config.gate_bias))

    @guarded
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, context: Context, state: State | None, position: PositionTerms
    ) -> tuple[Tensor, State | None]:
        """Return softmax(q k^T / sqrt(D) + F_i - F_j) v over all keys of the cache, and the next cache."""
        k, v, state = appended(state, k, v)
        gates, dropout = self.log_gates(k, context), self.config.dropout if self.training else 0.0
        has_terms = position is not None and not position.is_plain
        call = GatedCall(q, k, v, gates, context, has_terms, dropout)
        if self.config.backend == "auto" and refusal(call) is None:
            return fused_forgetting(call), state
        decay = decay_between(gates.cumsum(-1), context)
        return self.attend(q, k, v, context, position, mods=(decay,)), state

    def explained(self) -> str:
        """Return what computes a whole text on the device of the parameters, and the reason."""
        q = self.gate_vector.new_zeros(1, len(self.gate_vector), 2, self.gate_vector.shape[1])
        return explained(self.config.backend, GatedCall(q, q, q, q[..., 0], Context(2, 2, causal=True)))

    def log_gates(self, k: Tensor, context: Context) -> Tensor:
        """Return log f [B, H, Tk] of keys k [B, Hkv, Tk, D], 0 at padding."""
        keys = at_least_float32(k)
        vector, bias = (x.to(keys.dtype) for x in (self.gate_vector, self.gate_bias))
        # [Hkv, G, D] x [B, Hkv, Tk, D] -> [B, H, Tk]: a key head has a gate for each of its query heads.
        logits = torch.einsum("hgd,bhtd->bhgt", vector.unflatten(0, (k.shape[1], -1)), keys).flatten(1, 2)
        gates = F.logsigmoid(logits + bias.unsqueeze(-1))
        if context.kv_valid is not None:
            gates = gates.masked_fill(~context.kv_valid.unsqueeze(1).bool(), 0)
        return gates


def decay_between(forgotten: Tensor, context: Context) -> ScoreMod:
    """Return the function score - |F_i - F_j|, for F [B, H, Tk]; in a causal model F_j is the greater."""
    # FlexAttention computes no gradient of a tensor that is indexed twice.
    slots = context.offset + torch.arange(context.q_len, device=forgotten.device)
    of_queries = forgotten.index_select(2, slots)

    @step("log of the gates between")
    @broadcasts
    def fade(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score - (of_queries[b, h, q_idx] - forgotten[b, h, kv_idx]).abs()

    return fade
