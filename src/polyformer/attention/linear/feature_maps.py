"""Feature maps phi with E[phi(q) . phi(k)] = a kernel of q and k, over random directions W.

    a = W x                                              W [M, D], rows of N(0, I)
    positive        phi = exp(a - |x|^2 / 2) / sqrt(M)               E = exp(q . k)
    trigonometric   phi = exp(|x|^2 / 2) [cos a, sin a] / sqrt(M)    E = exp(q . k)
    gaussian        phi = [cos a, sin a] / sqrt(M)                   E = exp(-|q - k|^2 / 2)
    relu            phi = max(a, 0) + 0.001                          a kernel of its own

Performer has the first two and the last, random feature attention the third. Every map is computed as
e^scale(x) * values(x), so that no exponential overflows: the values are at most 1 where there is an
exponential (their maximum is in `scale`), and the scale is added to the log weights of the keys. Choromanski
et al. 2021, lemma 1 and section 3; Peng et al. 2021, section 2.2.
"""

import dataclasses
import functools
import math
from typing import ClassVar

import torch
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.ops.linear import linear
from polyformer.ops.sines import cosines_and_sines

RELU_FLOOR = 1e-3
"""Added to every feature of the relu map."""


class FeatureMap:
    """phi(x) = e^scale * values. `norm`: the factor of |x|^2 / 2 in scale. `double`: two values a
    direction. `unit`: what a is multiplied by before `values` reads it."""

    norm: ClassVar[float] = 0.0
    double: ClassVar[bool] = False
    unit: ClassVar[float] = 1.0

    def values(self, a: Tensor) -> tuple[Tensor, Tensor | float]:
        """Values [..., M or 2 M] of a = W x * unit [..., M], which is written over, and the rest of the scale
        beside the norm, [...] or a number.

        That rest only moves weight between the two factors: gradients treat it as a constant.
        """
        raise NotImplementedError

    def backward(self, values: Tensor, grad_values: Tensor) -> Tensor:
        """The gradient of W x; what it is computed from may be written over."""
        raise NotImplementedError


class Positive(FeatureMap):
    """phi = exp(a - |x|^2 / 2) / sqrt(M), by powers of 2, which a processor computes faster."""

    norm = -1.0
    unit = math.log2(math.e)

    def values(self, a: Tensor) -> tuple[Tensor, Tensor | float]:
        """exp(a - max a), and max a - log(M) / 2."""
        top = a.detach().amax(-1, keepdim=True)
        return a.sub_(top).exp2_(), top.squeeze(-1) * math.log(2) - math.log(a.shape[-1]) / 2

    def backward(self, values: Tensor, grad_values: Tensor) -> Tensor:
        """d exp(a) = exp(a) da."""
        return grad_values.mul_(values)


class Gaussian(FeatureMap):
    """phi = [cos a, sin a] / sqrt(M)."""

    double = True

    def values(self, a: Tensor) -> tuple[Tensor, Tensor | float]:
        """[cos a, sin a], and -log(M) / 2."""
        recorded = torch.is_grad_enabled() and a.requires_grad
        values = torch.cat([a.cos(), a.sin()], -1) if recorded else cosines_and_sines(a)
        return values, -math.log(a.shape[-1]) / 2

    def backward(self, values: Tensor, grad_values: Tensor) -> Tensor:
        """d cos a = -sin a da, d sin a = cos a da."""
        (cos, sin), (grad_cos, grad_sin) = values.chunk(2, -1), grad_values.chunk(2, -1)
        return (cos * grad_sin).addcmul_(sin, grad_cos, value=-1)


class Trigonometric(Gaussian):
    """phi = exp(|x|^2 / 2) [cos a, sin a] / sqrt(M)."""

    norm = 1.0


class Relu(FeatureMap):
    """phi = max(a, 0) + 0.001."""

    def values(self, a: Tensor) -> tuple[Tensor, Tensor | float]:
        """max(a, 0) + 0.001."""
        return a.clamp_min_(0).add_(RELU_FLOOR), 0.0

    def backward(self, values: Tensor, grad_values: Tensor) -> Tensor:
        """d max(a, 0) = (a > 0) da."""
        return grad_values.mul_(values > RELU_FLOOR)


MAPS: dict[str, FeatureMap] = {
    "positive": Positive(),
    "trigonometric": Trigonometric(),
    "gaussian": Gaussian(),
    "relu": Relu(),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Kernel:
    """A feature map of factor * x and its directions W [M, D].

    `floor` bounds denominators, as a share of phi(x) . phi(x) for maps by sines: see `weights.bounded`.
    """

    map: FeatureMap
    directions: Tensor
    floor: float = 0.0
    factor: float = 1.0

    @property
    def width(self) -> int:
        """The number of values of a vector."""
        return len(self.directions) * (2 if self.map.double else 1)

    @property
    def least(self) -> float:
        """The floor of products of values, which for maps by sines are those of phi times M."""
        return self.floor * len(self.directions)

    @functools.cached_property
    def rows(self) -> Tensor:
        """factor * W, times what the map reads."""
        return self.directions * (self.factor * self.map.unit)

    def values(self, x: Tensor) -> tuple[Tensor, Tensor | float]:
        """The values [..., width] of x [..., D], and what `weighed` leaves out of their scale."""
        return self.map.values(linear(x, self.rows))

    def weighed(self, x: Tensor, weight: Tensor) -> Tensor:
        """Log weights [...] of x [..., D] and the part of their scales that is not of the features."""
        if not self.map.norm:
            return weight
        return weight.add(x.square().sum(-1), alpha=self.map.norm / 2 * self.factor**2)

    def features(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Values [..., width] and scale [...] of x [..., D]: phi(x) = e^scale * values."""
        values, rest = self.values(x)
        return values, self.weighed(x, x.new_zeros(x.shape[:-1])) + rest

    def backward(self, x: Tensor, values: Tensor, grad_values: Tensor, grad_scale: Tensor | None) -> Tensor:
        """The gradient of x: W^T grad_a + grad_scale * norm * x; no `grad_scale` where the scale is not
        used. `grad_values` may be written over."""
        grad_x = linear(self.map.backward(values, grad_values), self.directions.T * self.factor)
        if grad_scale is None or not self.map.norm:
            return grad_x
        return grad_x.addcmul_(x, grad_scale.unsqueeze(-1), value=self.map.norm * self.factor**2)


def check_features(features: int, redraw_every: int | None) -> None:
    """Raises `InputError` unless there is a direction, and a step or more from one draw to the next."""
    if features < 1:
        raise InputError(f"features: expected 1 or more random directions, got {features}; 256 is usual")
    if redraw_every is not None and redraw_every < 1:
        raise InputError(
            f"redraw_every: expected 1 training step or more, or null for never, got {redraw_every}"
        )
