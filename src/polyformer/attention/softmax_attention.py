"""Softmax attention over a pattern of keys: softmax(q k^T / sqrt(D)) v. That of 2017 and its sparse kin.

Cost: 2 Tq Tk (D + Dv) products a head where the pattern is full, and in proportion to the keys it allows.
Vaswani et al. 2017, section 3.2.
"""

import dataclasses
from typing import ClassVar

from torch import Tensor

from polyformer.attention.base import Mechanism, MechanismConfig, ScoreTerms
from polyformer.core.config import Config
from polyformer.core.kv_cache import KeyValueCache, appended
from polyformer.core.state import State
from polyformer.dot_product.attend import attend
from polyformer.patterns.base import Pattern
from polyformer.sequence.context import Context


@dataclasses.dataclass(frozen=True, kw_only=True)
class SoftmaxConfig(MechanismConfig):
    """`pattern`: who attends to whom, beyond what causality, padding and documents forbid; None for all."""

    pattern: Pattern | None = None
    dropout: float = 0.0  # of attention weights
    scale: float | None = None  # by default 1 / sqrt(D)
    backend: str = "auto"

    kind: ClassVar[str] = "softmax"
    paper: ClassVar[str] = "Vaswani et al. 2017, section 3.2"
    remembers: ClassVar[bool] = True
    spreads: ClassVar[bool] = True
    separate_queries: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.pattern is not None and not self.pattern.causal():
            object.__setattr__(self, "causal", False)
            object.__setattr__(self, "instead", "a pattern that asks nothing of later tokens")

    def changed(self, value: object, where: str) -> Config | None:
        """A pattern takes the place of the pattern alone: the scale and the dropout stay."""
        pattern = Pattern.meant(value)
        return (
            super().changed(value, where) if pattern is None else dataclasses.replace(self, pattern=pattern)
        )

    def build(self, num_heads: int, head_size: int) -> "SoftmaxAttention":
        """Without parameters: `attend` over the pattern."""
        return SoftmaxAttention(self)

    def at(self, layer: int) -> "SoftmaxConfig":
        """With the pattern of layer `layer`."""
        return (
            self
            if self.pattern is None
            else dataclasses.replace(self, pattern=self.pattern.layer_pattern(layer))
        )

    def definition(self) -> "SoftmaxConfig":
        """All pairs at once: softmax(q k^T / sqrt(D)) v with a dense mask."""
        return dataclasses.replace(self, backend="definition")

    def cross(self) -> "SoftmaxConfig":
        """Over all keys, with the same scale: a pattern is of a sequence and itself."""
        return dataclasses.replace(self, pattern=None)


class SoftmaxAttention(Mechanism):
    """`attend` with a key-value cache for state."""

    def __init__(self, config: SoftmaxConfig):
        super().__init__()
        self.config = config

    def new_state(self, reserve: int) -> KeyValueCache:
        """A key-value cache."""
        return KeyValueCache(reserve=reserve)

    def extended(self, state: State, k: Tensor, v: Tensor) -> State:
        """With the keys and values in the cache."""
        _, _, extended = appended(state, k, v)
        assert extended is not None
        return extended

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: Context,
        state: State | None,
        position: ScoreTerms | None,
    ) -> tuple[Tensor, State | None]:
        """softmax(q k^T scale) v over the pattern, and over all keys of the cache."""
        k, v, state = appended(state, k, v)
        pattern = self.config.pattern
        context = context.within_distances(None if pattern is None else pattern.distance_range())
        y = attend(
            q,
            k,
            v,
            pattern=pattern,
            score_mod=None if position is None else position.score_mod(q, k, context),
            relative=None if position is None else position.relative(q, k, context),
            context=context,
            scale=self.config.scale,
            dropout=self.config.dropout if self.training else 0.0,
            backend=self.config.backend,
        )
        return y, state
