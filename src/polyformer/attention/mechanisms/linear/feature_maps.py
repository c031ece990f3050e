"""Feature maps phi with E[phi(q) . phi(k)] = a kernel of q and k, over random directions W.

    a = W x                                              W [M, D], rows of N(0, I)
    positive        phi = exp(a - |x|^2 / 2) / sqrt(M)               E = exp(q . k)
    trigonometric   phi = exp(|x|^2 / 2) [cos a, sin a] / sqrt(M)    E = exp(q . k)
    gaussian        phi = [cos a, sin a] / sqrt(M)                   E = exp(-|q - k|^2 / 2)
    relu            phi = max(a, 0) + 0.001                          another kernel

Performer has the first two and the last, random feature attention the third. Every map is computed as
e^scale(x) * values(x), so that no exponential overflows: values with exponentials are at most 1 (their
maximum is in `scale`), and the scale is added to the log weights of the keys. Choromanski et al. 2021, lemma
1 and section 3; Peng et al. 2021, section 2.2.
"""

import dataclasses
import functools
import math
from typing import ClassVar

import torch
from torch import Tensor

from polyformer.core.ops.linear import linear

RELU_FLOOR = 1e-3
"""Added to every feature of the relu map."""


class FeatureMap:
    """phi(x) = e^scale * values.

    `norm`: the factor of |x|^2 / 2 in scale. `double`: whether a direction gives two values. `unit`: the
    factor of a in the input of `values`.
    """

    norm: ClassVar[float] = 0.0
    double: ClassVar[bool] = False
    unit: ClassVar[float] = 1.0

    def values(self, a: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return the values [..., M or 2 M] of a = W x * unit [..., M], and the rest of the scale.

        `a` is overwritten. The rest of the scale, without the norm, is [...] or a number; it only moves
        weight between the two factors, so gradients treat it as a constant.
        """
        raise NotImplementedError

    def backward(self, values: Tensor, grad_values: Tensor) -> Tensor:
        """Return the gradient of W x; may overwrite its arguments."""
        raise NotImplementedError


class Positive(FeatureMap):
    """phi = exp(a - |x|^2 / 2) / sqrt(M), computed with base 2, which is faster."""

    norm = -1.0
    unit = math.log2(math.e)

    def values(self, a: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return exp(a - max a), and max a - log(M) / 2."""
        # With the maximum moved to the scale, the values are at most 1.
        top = a.detach().amax(-1, keepdim=True)
        return a.sub_(top).exp2_(), top.squeeze(-1) * math.log(2) - math.log(a.shape[-1]) / 2

    def backward(self, values: Tensor, grad_values: Tensor) -> Tensor:
        """Return the gradient by d exp(a) = exp(a) da."""
        return grad_values.mul_(values)


class Gaussian(FeatureMap):
    """phi = [cos a, sin a] / sqrt(M)."""

    double = True

    def values(self, a: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return [cos a, sin a], and -log(M) / 2."""
        return torch.cat([a.cos(), a.sin()], -1), -math.log(a.shape[-1]) / 2

    def backward(self, values: Tensor, grad_values: Tensor) -> Tensor:
        """Return the gradient by d cos a = -sin a da, d sin a = cos a da."""
        (cos, sin), (grad_cos, grad_sin) = values.chunk(2, -1), grad_values.chunk(2, -1)
        return (cos * grad_sin).addcmul_(sin, grad_cos, value=-1)


class Trigonometric(Gaussian):
    """phi = exp(|x|^2 / 2) [cos a, sin a] / sqrt(M)."""

    norm = 1.0


class Relu(FeatureMap):
    """phi = max(a, 0) + 0.001."""

    def values(self, a: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return max(a, 0) + 0.001, and 0."""
        return a.clamp_min_(0).add_(RELU_FLOOR), 0.0

    def backward(self, values: Tensor, grad_values: Tensor) -> Tensor:
        """Return the gradient by d max(a, 0) = (a > 0) da."""
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

    `floor` is the lower bound of denominators, for sine maps as a share of phi(x) . phi(x): see
    `sums.floor_denominators`.
    """

    map: FeatureMap
    directions: Tensor
    floor: float = 0.0
    factor: float = 1.0

    @property
    def width(self) -> int:
        """The number of features of a vector."""
        return len(self.directions) * (2 if self.map.double else 1)

    @property
    def least(self) -> float:
        """The floor of products of values, which for sine maps are M times the products of phi."""
        return self.floor * len(self.directions)

    @functools.cached_property
    def rows(self) -> Tensor:
        """W times `factor` and the `unit` of the map."""
        return self.directions * (self.factor * self.map.unit)

    def values(self, x: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return the values [..., width] of x [..., D], and the part of their scale without the norm."""
        # a = W x: [..., D] -> [..., M]
        return self.map.values(linear(x, self.rows))

    def add_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the log weights [...] of x [..., D] plus the norm part of their scales."""
        if not self.map.norm:
            return weight
        return weight.add(x.square().sum(-1), alpha=self.map.norm / 2 * self.factor**2)

    def features(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return values [..., width] and scale [...] of x [..., D]: phi(x) = e^scale * values."""
        # The scale has two parts: the norm |x|^2 / 2, and what `values` moved out of the features.
        values, rest = self.values(x)
        return values, self.add_norm(x, x.new_zeros(x.shape[:-1])) + rest

    def backward(self, x: Tensor, values: Tensor, grad_values: Tensor, grad_scale: Tensor | None) -> Tensor:
        """Return the gradient of x: W^T grad_a + grad_scale * norm * x.

        `grad_scale` is None if the scale is not used. `grad_values` may be overwritten.
        """
        # W^T grad_a: [..., M] -> [..., D]
        grad_x = linear(self.map.backward(values, grad_values), self.directions.T * self.factor)
        if grad_scale is None or not self.map.norm:
            return grad_x
        return grad_x.addcmul_(x, grad_scale.unsqueeze(-1), value=self.map.norm * self.factor**2)
