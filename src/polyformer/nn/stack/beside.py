"""Two kinds of attention in parallel in a layer, each with its own projections; the layer adds them.

    y = s_A A(r_A x) + s_B B(r_B x)        x: the layer's (normed) input

A is the attention of the configuration, B is `beside` it. In Falcon-H1 A is Mamba-2 and B softmax attention:
the state sums the whole text, and softmax looks up single tokens. Zuo et al. 2025 (Falcon-H1), section 2.
"""

import dataclasses
from typing import Any

from torch import Tensor

from polyformer.attention.positions import Position
from polyformer.core.ops.softmax import recorded, recording
from polyformer.core.sequence.context import Context
from polyformer.core.sequence.tokens import Reach
from polyformer.core.state import State, StateOfStates
from polyformer.nn.stack.config import AttentionConfig
from polyformer.nn.stack.feature_attention import FeatureAttention
from polyformer.nn.stack.multihead import MultiHeadAttention


@dataclasses.dataclass(frozen=True)
class StateBeside(StateOfStates):
    """The states of both kinds of attention, None for a kind that keeps nothing."""

    first: State | None = None
    beside: State | None = None


class AttentionBeside(FeatureAttention):
    """The attention A with all that it has, and the attention B in `beside`: x [B, T, E] -> [B, T, E].

    The recorded weights belong to B.
    """

    def __init__(self, hidden_size: int, config: AttentionConfig, layer: int = 0):
        super().__init__(hidden_size, config, layer)
        own, plain = config.beside, config.beside_config()
        assert own is not None
        kind = FeatureAttention if plain.has_features(layer) else MultiHeadAttention
        self.beside = kind(hidden_size, plain, layer)
        self.input_scales, self.output_scales = own.input_scales, own.output_scales

    def new_state(self, reserve: int) -> State | None:
        """Return the states before the first token, with caches for `reserve` tokens."""
        return StateBeside(super().new_state(reserve), self.beside.new_state(reserve))

    def reach(self) -> Reach | None:
        """Return None: both kinds read the same tokens, and A may read all."""
        return None

    def forward(
        self, x: Tensor, context: Context, position: Position, state: State | None = None, **features: Any
    ) -> tuple[Tensor, State | None]:
        """Return the sum of both kinds of attention of x, and the states that include x.

        No feature of a `FeatureLayer` comes with it: the configuration refuses them.
        """
        assert not any(feature is not None for feature in features.values())
        past = state if isinstance(state, StateBeside) else StateBeside()
        if recording():
            with recorded():  # the weights of A
                y, first = super().forward(scaled(x, self.input_scales[0]), context, position, past.first)
        else:
            y, first = super().forward(scaled(x, self.input_scales[0]), context, position, past.first)
        z, beside = self.beside(scaled(x, self.input_scales[1]), context, position, past.beside)
        both = scaled(y, self.output_scales[0]) + scaled(z, self.output_scales[1])
        return both, None if state is None else StateBeside(first, beside)

    def reading(self, x: Tensor, read: Tensor, context: Context, position: Position) -> Tensor:
        """Return the attention of x [B, T, E] with keys and values from `read`, of the same tokens."""
        r_first, r_beside = self.input_scales
        y, _ = super().forward(scaled(x, r_first), context, position, read=scaled(read, r_first))
        z = self.beside.reading(scaled(x, r_beside), scaled(read, r_beside), context, position)
        return scaled(y, self.output_scales[0]) + scaled(z, self.output_scales[1])


def scaled(x: Tensor, factor: float) -> Tensor:
    """Return x times a factor, x itself for 1."""
    return x if factor == 1.0 else x * factor
