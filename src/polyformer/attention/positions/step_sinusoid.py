"""The Universal Transformer's positions: sinusoids of the position and of the step, added at every step.

    PE(p, t) = PE(p) + PE(t)        p the token's position, t the step: the index of the layer

PE is the function `sinusoids` (the circled plus in some texts is this sum). There are no parameters, and the
length and the number of steps are not limited. Positions and steps count from 0, in the paper from 1. Token
vectors are multiplied by sqrt(E), as with `sinusoidal`. Dehghani et al. 2019, section 2.1.
"""

import dataclasses
from typing import Annotated, ClassVar

import torch
from annotated_types import Gt
from torch import Tensor

from polyformer.attention.positions.base import Position, PositionConfig, Shape, sinusoids


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSinusoidConfig(PositionConfig):
    """Step sinusoids: sinusoids of position and step are added to the input of every layer."""

    base: Annotated[float, Gt(1)] = 10000.0

    kind: ClassVar[str] = "step_sinusoid"
    paper: ClassVar[str] = "Dehghani et al. 2019 (Universal Transformer), section 2.1"

    def build(self, shape: Shape) -> "StepSinusoid":
        return StepSinusoid(shape.hidden_size, self)


class StepSinusoid(Position):
    """The module that adds the sinusoids to the input of every layer."""

    adds_sinusoids = True

    def __init__(self, hidden_size: int, config: StepSinusoidConfig):
        super().__init__()
        self.hidden_size, self.base = hidden_size, config.base

    def embed(self, x: Tensor, pos: Tensor, layer: int) -> Tensor:
        """Return x_p + PE(p) + PE(layer) at every layer."""
        # PE(layer) is [E] and broadcasts over positions.
        step = sinusoids(torch.full((), layer, device=pos.device), self.hidden_size, self.base)
        return x + (sinusoids(pos, self.hidden_size, self.base) + step).to(x.dtype)
