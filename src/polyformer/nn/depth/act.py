"""Adaptive computation time: every token learns its number of steps.

With s_n the state of a token after layer n, and a halting unit shared by all layers,

    p_n = logistic(w . s_n + b)        N = min {n : p_1 + ... + p_n >= 1 - epsilon}, at most all layers
    R   = 1 - (p_1 + ... + p_(N-1))    y = p_1 s_1 + ... + p_(N-1) s_(N-1) + R s_N

The output of the stack is y. After N the state is copied, s_(N+1) = s_N: other tokens attend to the unchanged
state, and it is not computed again. Training adds `ponder_loss` times the mean of N + R over the tokens; N
has no gradient. Graves 2016 (Adaptive Computation Time), section 2; for layers with shared weights (one
group, `num_hidden_groups=1`) Dehghani et al. 2019 (Universal Transformers), section 2.2.

`halting_bias` is the initial value of b. With 1, as in the authors' code, p is about 0.73, N is 2 for every
token, and the second step gets a quarter of the weight: the gradient hardly moves a unit away from this.
Lower values start with more steps, and training removes steps that do not reduce the loss.
"""

import dataclasses
from collections.abc import Callable
from typing import Annotated, ClassVar

import torch
from annotated_types import Interval
from torch import Tensor, nn

from polyformer.attention.positions import Shape
from polyformer.core.ops.layers import add_auxiliary_loss
from polyformer.core.ops.norms import NormConfig
from polyformer.core.ranges import FiniteFloat, NonNegativeFloat
from polyformer.nn.depth.base import Active, Depth, DepthConfig, DepthInput, Halting


@dataclasses.dataclass(frozen=True, kw_only=True)
class ACTConfig(DepthConfig):
    """Adaptive computation time: each token learns how many layers it goes through.

    The number of steps is at most the number of layers of the stack.
    """

    epsilon: Annotated[float, Interval(gt=0, lt=1)] = 0.01
    ponder_loss: NonNegativeFloat = 0.01
    halting_bias: FiniteFloat = -1.0

    kind: ClassVar[str] = "act"
    paper: ClassVar[str] = "Graves 2016; Dehghani et al. 2019, section 2.2"
    eager: ClassVar[str] = "which tokens go on depends on computed numbers"

    @classmethod
    def examples(cls) -> tuple["ACTConfig", ...]:
        """Return an example that halts many tokens after a step, and an example with more steps."""
        return cls(epsilon=0.1, halting_bias=1.0), cls()

    def build(self, shape: Shape, norm: NormConfig | None) -> "ACT":
        return ACT(self, shape.hidden_size, shape.num_layers)


class ACT(Depth):
    """The halting unit p = logistic(w . s + b), the same in every layer."""

    def __init__(self, config: ACTConfig, hidden_size: int, steps: int):
        super().__init__()
        self.config, self.steps = config, steps
        # Zeros make p = logistic(halting_bias) at first, the same for every token and layer.
        self.weight = nn.Parameter(torch.zeros(hidden_size))
        self.bias = nn.Parameter(torch.tensor([config.halting_bias]))

    def start(self, inputs: DepthInput) -> "ACTHalting":
        """Return the sums of a new call, all zero."""
        # Sums belong to a call, not to the module: threads may run the same model.
        return ACTHalting(self, inputs)


class ACTHalting(Halting):
    """The halting decisions of a call.

    total_probability: [B, T], the sum of the probabilities so far. weighted_mean: [B, T, E], the sum of the
    states weighted by them. remainder: [B, T], R of the tokens that have halted.
    """

    def __init__(self, act: ACT, inputs: DepthInput):
        super().__init__(inputs)
        self.act = act
        # At least float32: a sum of half-precision probabilities may never reach 1 - epsilon.
        exact = torch.promote_types(inputs.x.dtype, torch.float32)
        self.total_probability = inputs.x.new_zeros(inputs.x.shape[:2], dtype=exact)
        self.remainder = torch.zeros_like(self.total_probability)
        self.weighted_mean = torch.zeros_like(inputs.x)

    def select_halted(self, layer: int, x: Tensor, active: Active) -> Tensor:
        """Return the tokens with a sum of probabilities of at least 1 - epsilon; all after the last layer."""
        # [1, N, E], only the tokens that have not halted.
        states = active.gather(x)
        weight, bias = self.act.weight.to(x.dtype), self.act.bias
        p = ((states @ weight).to(self.total_probability.dtype) + bias)[0].sigmoid()  # [N]
        total_probability = self.total_probability.flatten()[active.index]
        halts = total_probability + p >= 1 - self.act.config.epsilon
        # There is no further layer, so the remaining tokens halt whatever their probability is.
        if layer == self.act.steps - 1:
            halts = torch.ones_like(halts)
        # The state after the last step gets the remainder R, so that the weights of a token sum to 1.
        state_weight = torch.where(halts, 1 - total_probability, p)
        weighted_mean = active.gather(self.weighted_mean) + (state_weight.unsqueeze(-1) * states).to(
            self.weighted_mean.dtype
        )
        self.weighted_mean = active.scatter(weighted_mean, self.weighted_mean)
        self.total_probability = _scatter_values(
            self.total_probability, active, total_probability + state_weight
        )
        self.remainder = _scatter_values(self.remainder, active, torch.where(halts, state_weight, 0))
        return halts

    def output(self, x: Tensor, finish: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the mean state y; the ponder cost is added to the training loss."""
        valid = self.inputs.valid
        # N + R, averaged over non-padding tokens. N has no gradient, R has one.
        ponder = ((self.depths + self.remainder) * valid).sum() / valid.sum().clamp_min(1)
        if self.act.training:
            add_auxiliary_loss("ponder", self.act.config.ponder_loss * ponder)
        # The output is the weighted mean y, not the state after the last layer.
        return super().output(self.weighted_mean, finish)


def _scatter_values(table: Tensor, active: Active, values: Tensor) -> Tensor:
    """Return `table` [B, T] with `values` [N] for the active tokens."""
    return table.flatten().index_copy(0, active.index, values).view(table.shape)
