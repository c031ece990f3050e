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
import math
from typing import ClassVar

import torch
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.ops.linear import linear

RELU_FLOOR = 1e-3
"""Added to every feature of the relu map."""


class FeatureMap:
    """phi(x) = e^scale * values. `norm`: the factor of |x|^2 / 2 in scale. `double`: two values a
    direction."""

    norm: ClassVar[float] = 0.0
    double: ClassVar[bool] = False

    def values(self, a: Tensor) -> tuple[Tensor, Tensor | None]:
        """Values [..., M or 2 M] of a = W x [..., M], and the rest of the scale beside the norm: [...] or
        None.

        That rest only moves weight between the two factors: gradients treat it as a constant.
        """
        raise NotImplementedError

    def backward(self, values: Tensor, grad_values: Tensor) -> Tensor:
        """The gradient of a."""
        raise NotImplementedError


class Positive(FeatureMap):
    """phi = exp(a - |x|^2 / 2) / sqrt(M)."""

    norm = -1.0

    def values(self, a: Tensor) -> tuple[Tensor, Tensor | None]:
        """exp(a - max a), and max a - log(M) / 2."""
        top = a.detach().amax(-1, keepdim=True)
        return (a - top).exp_(), top.squeeze(-1) - math.log(a.shape[-1]) / 2

    def backward(self, values: Tensor, grad_values: Tensor) -> Tensor:
        """d exp(a) = exp(a) da."""
        return values * grad_values


class Gaussian(FeatureMap):
    """phi = [cos a, sin a] / sqrt(M)."""

    double = True

    def values(self, a: Tensor) -> tuple[Tensor, Tensor | None]:
        """[cos a, sin a] / sqrt(M)."""
        return torch.cat([a.cos(), a.sin()], -1) * a.shape[-1] ** -0.5, None

    def backward(self, values: Tensor, grad_values: Tensor) -> Tensor:
        """d cos a = -sin a da, d sin a = cos a da."""
        (cos, sin), (grad_cos, grad_sin) = values.chunk(2, -1), grad_values.chunk(2, -1)
        return cos * grad_sin - sin * grad_cos


class Trigonometric(Gaussian):
    """phi = exp(|x|^2 / 2) [cos a, sin a] / sqrt(M)."""

    norm = 1.0


class Relu(FeatureMap):
    """phi = max(a, 0) + 0.001."""

    def values(self, a: Tensor) -> tuple[Tensor, Tensor | None]:
        """max(a, 0) + 0.001."""
        return a.clamp_min(0) + RELU_FLOOR, None

    def backward(self, values: Tensor, grad_values: Tensor) -> Tensor:
        """d max(a, 0) = (a > 0) da."""
        return grad_values * (values > RELU_FLOOR)


MAPS: dict[str, FeatureMap] = {
    "positive": Positive(),
    "trigonometric": Trigonometric(),
    "gaussian": Gaussian(),
    "relu": Relu(),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Kernel:
    """A feature map and its directions W [M, D]. `floor` bounds denominators: see `weights.bounded`."""

    map: FeatureMap
    directions: Tensor
    floor: float = 0.0

    @property
    def width(self) -> int:
        """The number of values of a vector."""
        return len(self.directions) * (2 if self.map.double else 1)

    def features(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Values [..., width] and scale [...] of x [..., D]: phi(x) = e^scale * values."""
        values, top = self.map.values(linear(x, self.directions))
        if self.map.norm:
            half = x.square().sum(-1) * (self.map.norm / 2)
            return values, half if top is None else top + half
        return values, x.new_zeros(x.shape[:-1]) if top is None else top

    def backward(self, x: Tensor, values: Tensor, grad_values: Tensor, grad_scale: Tensor | None) -> Tensor:
        """The gradient of x: W^T grad_a + grad_scale * norm * x; no `grad_scale` where the scale is not
        used."""
        grad_x = linear(self.map.backward(values, grad_values), self.directions.T)
        if grad_scale is None or not self.map.norm:
            return grad_x
        return grad_x.addcmul_(x, grad_scale.unsqueeze(-1), value=self.map.norm)


def check_features(features: int, redraw_every: int | None) -> None:
    """Raises `InputError` unless there is a direction, and a step or more from one draw to the next."""
    if features < 1:
        raise InputError(f"features: expected 1 or more random directions, got {features}; 256 is usual")
    if redraw_every is not None and redraw_every < 1:
        raise InputError(
            f"redraw_every: expected 1 training step or more, or null for never, got {redraw_every}"
        )
