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
from typing import ClassVar, Literal

from torch import Tensor

from polyformer.attention.functional.isolation import guarded
from polyformer.attention.mechanisms.base import Heads, PositionTerms
from polyformer.attention.mechanisms.linear.feature_attention import (
    RandomFeatureAttention,
    RandomFeaturesConfig,
)
from polyformer.attention.mechanisms.linear.feature_maps import MAPS, Kernel
from polyformer.core.ops.autograd import at_least_float32
from polyformer.core.ranges import PositiveInt
from polyformer.core.sequence.context import Context
from polyformer.core.state import State


@dataclasses.dataclass(frozen=True, kw_only=True)
class PerformerConfig(RandomFeaturesConfig):
    """Performer attention: positive random features estimate softmax attention in linear time.

    `features`: the number of rows of W; the trigonometric map computes two features per row.
    """

    features: PositiveInt = 256
    map: Literal["positive", "trigonometric", "relu"] = "positive"
    orthogonal: bool = True
    redraw_every: PositiveInt | None = 1000

    kind: ClassVar[str] = "performer"
    paper: ClassVar[str] = "Choromanski et al. 2021, section 2"

    @property
    def width(self) -> int:
        """Return the number of features of a vector: a sine and a cosine per row, or one exponential."""
        return self.features * (2 if self.map == "trigonometric" else 1)

    def build(self, num_heads: int, head_size: int) -> "Performer":
        """Return the module; all heads share W."""
        return Performer(self, head_size)

    @classmethod
    def examples(cls) -> tuple["PerformerConfig", ...]:
        """Return configs with few features of every map."""
        return (
            cls(features=16),
            cls(features=9, orthogonal=False, redraw_every=2),
            cls(features=5, map="relu"),
        )


class Performer(RandomFeatureAttention):
    """Attention by the features of q / D^(1/4) and k / D^(1/4)."""

    config: PerformerConfig

    def kernel(self, q: Tensor) -> Kernel:
        """Return the feature map of queries and keys in the precision and on the device of `q`."""
        # Positive features need no floor: all terms of the denominator are positive.
        floor = self.config.floor if self.config.map == "trigonometric" else 0.0
        # D^(-1/4) for both q and k gives scores of q . k / sqrt(D).
        return Kernel(MAPS[self.config.map], self.directions(q), floor, factor=q.shape[3] ** -0.25)

    @guarded
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, context: Context, state: State | None, position: PositionTerms
    ) -> tuple[Tensor, State | None]:
        """Attend in at least float32: features are exponentials, which half precision would round."""
        y, state = self.attend(Heads(at_least_float32(q), at_least_float32(k), v), context, state)
        return y.to(q.dtype), state
