"""Transformer-XL's recurrence: a segment attends to the hidden states of the segments before it.

    q = h W_q        k, v = [SG(m), h] (W_k, W_v)        m' = the last `length` of [m, h]

with h [B, T, E] the input of a layer for the segment, m [B, M, E] the input for the tokens before it, and SG
the identity without a gradient: W_k and W_v learn from the memory, the earlier segments do not. Every token
of a segment sees the whole memory, so that the distance grows to M + T - 1 at its last token. With the
pattern `Window(M)` each token sees the M tokens before it, and any split into segments is equivalent to a
single pass (`same_length` in the authors' code is `Window(M - 1)`). Dai et al. 2019, section 3.2.

Costs M E numbers per layer, and attention to M more keys. In evaluation the last `length` keys and values are
kept instead of m: the cost of a token does not depend on the number of earlier tokens.
"""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from polyformer.attention.positions import Shape
from polyformer.core.ranges import NonNegativeInt
from polyformer.core.state import State
from polyformer.nn.memory.base import Memory, MemoryConfig, MemoryLayer


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrentConfig(MemoryConfig):
    """Recurrent memory: each layer attends to hidden states of the segments before.

    Every layer keeps its last `length` tokens; 0 for none.
    """

    length: NonNegativeInt = 128

    kind: ClassVar[str] = "recurrent"
    paper: ClassVar[str] = "Dai et al. 2019 (Transformer-XL), section 3.2"

    def build(self, shape: Shape) -> "Recurrent":
        return Recurrent(self.length)


@dataclasses.dataclass(frozen=True)
class Hidden(State):
    """The inputs [B, M, E] of a layer for the last M tokens; None before the first token."""

    vectors: Tensor | None = None


class Recurrent(Memory):
    """A first-in, first-out memory of hidden states."""

    def new_state(self, layer: int) -> Hidden:
        return Hidden()

    def past_inputs(self, state: State) -> Tensor | None:
        """Return all vectors of the state."""
        assert isinstance(state, Hidden)
        return state.vectors

    def next_state(self, state: State, x: Tensor, layer: MemoryLayer) -> Hidden:
        """Return the last `length` vectors of the state and x."""
        assert isinstance(state, Hidden)
        if not self.length:  # x[:, -0:] would be all of x
            return Hidden()
        # SG in the equation: no gradient flows into earlier segments.
        x = x.detach()[:, -self.length :]
        if state.vectors is None or x.shape[1] == self.length:
            return Hidden(x.clone())
        # The oldest vectors are dropped first.
        earlier = state.vectors[:, -(self.length - x.shape[1]) :]
        return Hidden(torch.cat([earlier.to(x.dtype), x], 1))
