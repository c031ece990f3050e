"""Performer: softmax attention estimated by positive random features, in time and memory linear in length.

    y_i = sum_j (phi(q_i') . phi(k_j')) v_j / sum_j phi(q_i') . phi(k_j')       x' = x / D^(1/4)
    phi(x) = exp(W x - |x|^2 / 2) / sqrt(M)        so that E[phi(q') . phi(k')] = exp(q . k / sqrt(D))

The rows of W [M, D] are drawn from N(0, I) and orthogonal in blocks of D. They are drawn again every
`redraw_every` training steps. Choromanski et al. 2021, lemma 2 and sections 2.3 and 2.4; features
"trigonometric" are its equation 10, "relu" the generalised attention of its section 4.3, which does not
estimate softmax.

Deviations: the maxima that keep exponentials in range are taken per query and key, joined in the log domain
by a running maximum. The paper's code takes a maximum over the batch and the future, and adds a small number
to every feature: here nothing is added, and padding has exactly no weight. The heads of a layer share W, as
in the paper's code. Denominators below `floor` times the sum of weights, possible only for features with a
sign, are raised to that bound. Costs: see `feature_attention`.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

from torch import Tensor

from polyformer.attention.functional.isolation import guarded
from polyformer.attention.mechanisms.base import Mechanism, MechanismBackend, MechanismConfig, ScoreTerms
from polyformer.attention.mechanisms.linear.context_parallel import packed_size
from polyformer.attention.mechanisms.linear.definition import definition
from polyformer.attention.mechanisms.linear.feature_attention import (
    NO_SCORE_BIAS_REASON,
    LinearState,
    linear_attention,
)
from polyformer.attention.mechanisms.linear.feature_maps import MAPS, Kernel
from polyformer.attention.mechanisms.linear.inputs import LinearInputs
from polyformer.core.kv_cache import KeyValueCache, appended
from polyformer.core.ops.precision import at_least_float32, without_autocast
from polyformer.core.ops.random_directions import RandomDirections
from polyformer.core.ranges import NonNegativeFloat, PositiveInt
from polyformer.core.sequence.context import Context
from polyformer.core.state import State


@dataclasses.dataclass(frozen=True, kw_only=True)
class PerformerConfig(MechanismConfig):
    """Performer attention: positive random features estimate softmax attention in linear time.

    `features`: the number of rows of W; the trigonometric map computes two features per row.
    """

    features: PositiveInt = 256
    map: Literal["positive", "trigonometric", "relu"] = "positive"
    orthogonal: bool = True  # false: independent rows
    redraw_every: PositiveInt | None = 1000  # training steps; null for never
    floor: NonNegativeFloat = 0.01  # of denominators with trigonometric features; 0 for the raw estimate
    backend: MechanismBackend = "auto"  # "definition": all pairs at once

    kind: ClassVar[str] = "performer"
    paper: ClassVar[str] = "Choromanski et al. 2021, section 2"
    supports_score_bias: ClassVar[bool] = False
    supports_context_parallel: ClassVar[bool] = True
    reasons: ClassVar[Mapping[str, str]] = {"supports_score_bias": NO_SCORE_BIAS_REASON}
    eager: ClassVar[str] = (
        "features are drawn from a seed that is read, and a Python loop walks over runs of tokens"
    )

    def __post_init__(self) -> None:
        if self.backend == "definition":
            object.__setattr__(self, "supports_context_parallel", False)

    def build(self, num_heads: int, head_size: int) -> "Performer":
        """Return the module, in linear time, or over all pairs with the backend "definition"."""
        return (PlainPerformer if self.backend == "definition" else Performer)(self, head_size)

    def definition(self) -> "PerformerConfig":
        """Return the config that computes all pairs at once."""
        return dataclasses.replace(self, backend="definition")

    def all_gathered_elements(self, heads: int, kv_heads: int, width: int, length: int) -> int:
        """Return the number of elements in the sums over all features of a key."""
        return packed_size(heads, width, self.features * (2 if self.map == "trigonometric" else 1))

    def cross(self) -> "PerformerConfig":
        """Return this config: features estimate softmax over any keys, the equation does not use slots."""
        return self

    @classmethod
    def examples(cls) -> tuple["PerformerConfig", ...]:
        """Return configs with few features of every map."""
        return (
            cls(features=16),
            cls(features=9, orthogonal=False, redraw_every=2),
            cls(features=5, map="relu"),
        )


class Performer(Mechanism):
    """Performer attention in linear time, with the sums over keys as state (`LinearState`)."""

    def __init__(self, config: PerformerConfig, head_size: int):
        super().__init__()
        self.config = config
        self.directions = RandomDirections(config.features, head_size, config.orthogonal, config.redraw_every)

    def new_state(self, reserve: int) -> State:
        """Return the sums over no keys; their size does not grow with the number of tokens."""
        return LinearState()

    def kernel(self, q: Tensor) -> Kernel:
        """Return the feature map of queries and keys in the precision and on the device of `q`."""
        # Positive features need no floor: all terms of the denominator are positive.
        floor = self.config.floor if self.config.map == "trigonometric" else 0.0
        # D^(-1/4) for both q and k gives scores of q . k / sqrt(D).
        return Kernel(MAPS[self.config.map], self.directions(q), floor, factor=q.shape[3] ** -0.25)

    @guarded
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: Context,
        state: State | None,
        position: ScoreTerms | None,
    ) -> tuple[Tensor, State | None]:
        """Attend by the features of q / D^(1/4) and k / D^(1/4)."""
        y, state = self._attend(at_least_float32(q), at_least_float32(k), v, context, state)
        self.directions.watch(y)
        return y.to(q.dtype), state

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, context: Context, state: State | None
    ) -> tuple[Tensor, State | None]:
        assert isinstance(state, LinearState | None)
        return linear_attention(q, k, v, self.kernel(q), context, state)


class PlainPerformer(Performer):
    """Performer attention by its equation over all pairs (`definition`), with a KV cache as state."""

    def new_state(self, reserve: int) -> State:
        """Return an empty KV cache."""
        return KeyValueCache(reserve=reserve)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, context: Context, state: State | None
    ) -> tuple[Tensor, State | None]:
        k, v, state = appended(state, k, v)
        with without_autocast(q):
            return definition(LinearInputs.of(q, k, v, self.kernel(q), context), context), state
