"""Dropout with cheap random numbers on a CPU: 16 bits per element, from numpy's SFC64.

torch draws one number after another, 10 nanoseconds each, which takes a seventh of a training step of BERT;
SFC64 draws four numbers in half of that time. The probability is rounded to a multiple of 1 / 65536, and kept
elements are scaled by exactly that probability, so the mean is unchanged. The seed comes from torch's
generator, so runs with the same torch seed are reproducible.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

STEPS = 1 << 16
"""Probabilities are multiples of 1 / STEPS."""

LARGE = 1 << 12
"""The least number of elements for which SFC64 pays off: it costs 30 microseconds to begin, torch 5
nanoseconds per element.

The constant does not depend on the processor, as it decides which numbers are drawn: a seed gives the same
mask everywhere.
"""


def dropout(x: Tensor, rate: float, training: bool = True) -> Tensor:
    """Return x with each element zero with probability `rate` and the others scaled to keep the mean."""
    if not training or rate == 0.0:
        return x
    if x.device.type != "cpu" or x.numel() < LARGE or torch.compiler.is_compiling():
        return F.dropout(x, rate, True)
    seed = int(torch.randint(1 << 62, ()))
    return _Dropped.apply(x, keep_mask(x.shape, rate, np.random.SFC64(seed)), scale(rate))


def keep_mask(shape: tuple[int, ...], rate: float, bits: np.random.SFC64) -> Tensor:
    """Return bools, False with probability `rate`, rounded to a multiple of 1 / `STEPS`."""
    count = math.prod(shape)
    words = np.atleast_1d(bits.random_raw(-(-count // 4)))
    return torch.from_numpy(words.view(np.uint16)[:count] >= _threshold(rate)).view(shape)


def scale(rate: float) -> float:
    """Return the scale that compensates for the elements that `keep_mask` drops."""
    return STEPS / (STEPS - _threshold(rate))


class DropoutScales:
    """The factors of dropout for a series of tensors: the same seed and shapes give the same factors.

    On a CPU the numbers are SFC64's, elsewhere those of a generator on the device, so that nothing is copied
    there.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.generator: np.random.SFC64 | torch.Generator | None = None  # for the device of the tensors

    def next(self, like: Tensor, rate: float) -> Tensor:
        """Return factors in the shape and type of `like`: 0 with probability `rate`, else 1 / (1 - rate)."""
        if self.generator is None:
            self.generator = _generator(like.device, self.seed)
        if isinstance(self.generator, torch.Generator):
            # Contiguous, as the order of the elements in memory decides which number each gets.
            kept = torch.empty(like.shape, dtype=like.dtype, device=like.device)
            return kept.bernoulli_(1 - rate, generator=self.generator).mul_(1 / (1 - rate))
        return torch.where(keep_mask(like.shape, rate, self.generator), scale(rate), 0.0).to(like.dtype)


def _generator(device: torch.device, seed: int) -> np.random.SFC64 | torch.Generator:
    return np.random.SFC64(seed) if device.type == "cpu" else torch.Generator(device).manual_seed(seed)


def _threshold(rate: float) -> int:
    return min(round(rate * STEPS), STEPS - 1)


class Dropout(nn.Dropout):
    """`torch.nn.Dropout` with the random numbers of this module."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x * kept / (1 - p) while training, x otherwise."""
        return dropout(x, self.p, self.training)


class _Dropped(torch.autograd.Function):
    """x where `mask`, scaled; the gradient gets the same mask and scale."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, mask: Tensor, factor: float) -> Tensor:
        """Return y = factor * mask * x."""
        ctx.save_for_backward(mask)
        ctx.factor = factor  # type: ignore[attr-defined]
        return torch.where(mask, x, 0.0).mul_(factor)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        """Return grad_x = factor * mask * grad."""
        (mask,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return torch.where(mask, grad, 0.0).mul_(ctx.factor), None, None  # type: ignore[attr-defined]
