"""Softmax attention over a pattern of keys: softmax(q k^T / sqrt(D)) v, dense as in 2017, or sparse.

With a soft cap c the scores are c tanh(s / c), after all terms of positions (Gemma Team 2024, section 2).
With a sink each head learns the score b of a key without a value (OpenAI 2025, gpt-oss, section 2), so that
weights may sum to less than 1: p_j = exp(s_j) / (exp(b) + sum_i exp(s_i)).

Cost: 2 Tq Tk (D + Dv) products per head if the pattern is full, otherwise proportional to the keys it allows.
Vaswani et al. 2017, section 3.2.
"""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor, nn

from polyformer.attention.functional.int8_pairs import attend_to_integers
from polyformer.attention.functional.score_options import soft_cap
from polyformer.attention.mechanisms.base import PositionTerms
from polyformer.attention.mechanisms.cached import CachedAttention
from polyformer.attention.mechanisms.pair_weights import PairWeightsConfig
from polyformer.core.kv_cache import Int8Cache, Int8Pairs, appended
from polyformer.core.ranges import PositiveFloat
from polyformer.core.sequence.context import Context
from polyformer.core.sequence.reach import Reach
from polyformer.core.state import State


@dataclasses.dataclass(frozen=True, kw_only=True)
class SoftmaxConfig(PairWeightsConfig):
    """Softmax attention: queries attend to the keys that a pattern allows.

    `pattern`: which keys each query attends to, in addition to the mask of causality, padding and documents;
    None for all keys. `soft_cap`: the limit of scores, by tanh; None for none. `sink`: whether each head
    learns the score of a key without a value.
    """

    soft_cap: PositiveFloat | None = None
    sink: bool = False
    backend: str = "auto"

    kind: ClassVar[str] = "softmax"
    paper: ClassVar[str] = "Vaswani et al. 2017, section 3.2"
    supports_part_rotations: ClassVar[bool] = True
    supports_context_parallel: ClassVar[bool] = True

    @property
    def changes_scores(self) -> bool:
        """Return whether the weights are not the softmax of the scaled products: by a soft cap or a sink."""
        return self.soft_cap is not None or self.sink

    def build(self, num_heads: int, head_size: int) -> "SoftmaxAttention":
        return SoftmaxAttention(self, num_heads)

    @classmethod
    def examples(cls) -> tuple["SoftmaxConfig", ...]:
        return cls(), cls(soft_cap=1.5, sink=True)


class SoftmaxAttention(CachedAttention):
    """Softmax attention by `attend`, with a KV cache as state."""

    reads_plain_positions = False

    def __init__(self, config: SoftmaxConfig, num_heads: int):
        super().__init__()
        self.config = config
        self.distances = None if config.pattern is None else config.pattern.structure.distances
        # A score of 0, as of a query and a key at right angles.
        self.sink = nn.Parameter(torch.zeros(num_heads)) if config.sink else None

    def reach(self) -> Reach | None:
        """Return the reach of the pattern."""
        return self.config.reach

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, context: Context, state: State | None, position: PositionTerms
    ) -> tuple[Tensor, State | None]:
        """Return softmax(q k^T scale) v over the pattern and all keys of the cache, and the next cache."""
        if isinstance(state, Int8Cache):
            integers, state = state.extended(k, v)
            y = self._attend_to_integers(q, integers, context, position)
            if y is not None:
                return y, state
            k, v = integers.dequantized(k.dtype)
        elif state is not None:
            k, v, state = appended(state, k, v)
        config, pattern = self.config, self.config.pattern
        mods = () if config.soft_cap is None else (soft_cap(config.soft_cap),)
        if position is not None:
            # Tables of relative positions are then computed only for distances inside the pattern.
            context = context.within_distances(self.distances)
        y = self.attend(
            q, k, v, context, position, pattern=pattern, mods=mods, scale=config.scale, sink=self.sink
        )
        return y, state

    def _attend_to_integers(
        self, q: Tensor, integers: Int8Pairs, context: Context, position: PositionTerms
    ) -> Tensor | None:
        """Return the attention of a single query, computed from the integers; None for other calls."""
        config = self.config
        plain = (position is None or position.is_plain) and not config.changes_scores
        if config.backend != "auto" or not plain:
            return None
        return attend_to_integers(q, integers, config.pattern, context, config.scale)
