"""Random features: maps phi with E[phi(q) . phi(k)] = a kernel, drawn without touching global random states.

    a = W x                                              W [M, D], rows of N(0, I)
    positive        phi = exp(a - |x|^2 / 2) / sqrt(M)               E = exp(q . k)
    trigonometric   phi = exp(|x|^2 / 2) [cos a, sin a] / sqrt(M)    E = exp(q . k)
    gaussian        phi = [cos a, sin a] / sqrt(M)                   E = exp(-|q - k|^2 / 2)
    relu            phi = max(a, 0) + 0.001                          a kernel of its own

Every map is kept as e^scale(x) * values(x), so that no exponential overflows: the values are at most 1 where
there is an exponential (the map's own maximum is in `scale`), and who uses them weighs in the log domain.
Choromanski et al. 2021, lemma 1 and section 3; Peng et al. 2021, section 2.2.
"""

import dataclasses
import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from polyformer.core.errors import InputError
from polyformer.ops.linear import linear

RELU_FLOOR = 1e-3


class FeatureMap:
    """phi(x) = e^scale * values. `norm`: what scale has of |x|^2 / 2. `double`: two values a direction."""

    norm: ClassVar[float] = 0.0
    double: ClassVar[bool] = False

    def values(self, a: Tensor) -> tuple[Tensor, Tensor | None]:
        """Values [..., M or 2 M] of a = W x [..., M], and what scale has beside the norm: [...] or None.

        That part only moves weight between the two factors: gradients treat it as a constant.
        """
        raise NotImplementedError

    def slope(self, values: Tensor, grad: Tensor) -> Tensor:
        """The gradient of a, from that of the values."""
        raise NotImplementedError


class Positive(FeatureMap):
    norm = -1.0

    def values(self, a: Tensor) -> tuple[Tensor, Tensor | None]:
        top = a.detach().amax(-1, keepdim=True)
        return (a - top).exp_(), top.squeeze(-1) - math.log(a.shape[-1]) / 2

    def slope(self, values: Tensor, grad: Tensor) -> Tensor:
        return values * grad


class Gaussian(FeatureMap):
    double = True

    def values(self, a: Tensor) -> tuple[Tensor, Tensor | None]:
        return torch.cat([a.cos(), a.sin()], -1) * a.shape[-1] ** -0.5, None

    def slope(self, values: Tensor, grad: Tensor) -> Tensor:
        (cos, sin), (of_cos, of_sin) = values.chunk(2, -1), grad.chunk(2, -1)
        return cos * of_sin - sin * of_cos


class Trigonometric(Gaussian):
    norm = 1.0


class Relu(FeatureMap):
    def values(self, a: Tensor) -> tuple[Tensor, Tensor | None]:
        return a.clamp_min(0) + RELU_FLOOR, None

    def slope(self, values: Tensor, grad: Tensor) -> Tensor:
        return grad * (values > RELU_FLOOR)


MAPS: dict[str, FeatureMap] = {
    "positive": Positive(),
    "trigonometric": Trigonometric(),
    "gaussian": Gaussian(),
    "relu": Relu(),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Kernel:
    """A map and its directions W [M, D]. `floor`: see `linear_attention`."""

    map: FeatureMap
    directions: Tensor
    floor: float = 0.0

    @property
    def width(self) -> int:
        """The number of values."""
        return len(self.directions) * (2 if self.map.double else 1)

    def features(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Values [..., width] and scale [...] of x [..., D]."""
        values, top = self.map.values(linear(x, self.directions))
        if self.map.norm:
            half = x.square().sum(-1) * (self.map.norm / 2)
            return values, half if top is None else top + half
        return values, x.new_zeros(x.shape[:-1]) if top is None else top

    def gradient(self, x: Tensor, values: Tensor, grad: Tensor, of_scale: Tensor | None) -> Tensor:
        """The gradient of x from those of its values and of its scale (None where that is not used)."""
        found = linear(self.map.slope(values, grad), self.directions.T)
        if of_scale is None or not self.map.norm:
            return found
        return found.addcmul_(x, of_scale.unsqueeze(-1), value=self.map.norm)


def directions(count: int, width: int, orthogonal: bool, generator: torch.Generator) -> Tensor:
    """W [count, width] in float64: rows of N(0, I), or such that blocks of `width` rows are orthogonal.

    Orthogonal rows have the lengths of independent ones, so that each row alone is still of N(0, I).
    """
    options = {"generator": generator, "dtype": torch.float64, "device": "cpu"}
    rows = torch.randn(count, width, **options)
    if not orthogonal:
        return rows
    q, r = torch.linalg.qr(torch.randn(-(-count // width), width, width, **options))
    turned = q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)  # uniform, and the same in every LAPACK
    return turned.mT.flatten(0, 1)[:count] * rows.norm(dim=1, keepdim=True)


class RandomDirections(nn.Module):
    """W, drawn again every `redraw_every` training steps if asked.

    Its whole state is a buffer of two whole numbers, the seed and the steps so far: a file repeats it, and
    no change of precision rounds it. The seed is drawn from torch's generator, as initial weights are; all
    else comes from a generator of its own. A step is counted by its backward pass, so that activations
    computed again are the same. Evaluation never draws anew.
    """

    origin: Tensor

    def __init__(self, count: int, width: int, orthogonal: bool = True, redraw_every: int | None = None):
        super().__init__()
        self.count, self.width, self.orthogonal, self.redraw_every = count, width, orthogonal, redraw_every
        seed = int(torch.randint(2**62, (), device="cpu"))
        self.register_buffer("origin", torch.tensor([seed, 0]))
        self._numbers: tuple[object, int, int] | None = None
        self._made: tuple[object, Tensor] | None = None

    def forward(self, like: Tensor) -> Tensor:
        """W [count, width] of the present draw, in the precision of `like` and where it is."""
        seed, steps = self._read()
        draw = steps // self.redraw_every if self.redraw_every else 0
        key = seed, draw, like.dtype, like.device
        if self._made is None or self._made[0] != key:
            generator = torch.Generator("cpu").manual_seed((seed + 0x9E3779B97F4A7C15 * draw) % 2**63)
            made = directions(self.count, self.width, self.orthogonal, generator)
            self._made = key, made.to(like.device, like.dtype)
        return self._made[1]

    def watch(self, output: Tensor) -> None:
        """Counts a training step when the gradient of `output` comes."""
        if self.training and self.redraw_every and output.requires_grad:
            output.register_hook(self._count)

    def _count(self, grad: Tensor) -> None:
        self.origin[1] += 1

    def _read(self) -> tuple[int, int]:
        """Seed and steps; an accelerator is asked only after they have changed."""
        version = None if self.origin.is_inference() else (id(self.origin), self.origin._version)
        if version is None or self._numbers is None or self._numbers[0] != version:
            seed, steps = self.origin.tolist()
            self._numbers = version, seed, steps
        return self._numbers[1], self._numbers[2]


def check_features(features: int, redraw_every: int | None) -> None:
    """Raises `InputError` for numbers of features or steps that cannot be."""
    if features < 1:
        raise InputError(f"features: expected 1 or more random directions, got {features}; 256 is usual")
    if redraw_every is not None and redraw_every < 1:
        raise InputError(
            f"redraw_every: expected 1 training step or more, or null for never, got {redraw_every}"
        )
