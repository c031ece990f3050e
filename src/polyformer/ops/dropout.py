"""Dropout whose random numbers cost little on a CPU: 16 bits an element, by numpy's SFC64.

torch draws one number after another, for 10 nanoseconds each, a seventh of a training step of BERT; SFC64
draws four at once in half of one. The chance is that of the nearest 65536th, and what is kept is scaled by
exactly that, so the mean is unchanged. Its seed comes from torch's generator: what torch repeats is repeated.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

STEPS = 1 << 16
"""Chances are multiples of one over this."""

LARGE = 1 << 12
"""Elements from which our own numbers pay: they cost 30 microseconds to begin with, torch's 5 nanoseconds
each. No processor decides it, for it decides what is drawn: a seed means the same mask on all of them."""


def dropout(x: Tensor, rate: float, training: bool = True) -> Tensor:
    """x with elements zero at the chance `rate`, the others scaled so that the mean stays."""
    if not training or rate == 0.0:
        return x
    if x.device.type != "cpu" or x.numel() < LARGE or torch.compiler.is_compiling():
        return F.dropout(x, rate, True)
    seed = int(torch.randint(1 << 62, ()))
    return _Dropped.apply(x, kept(x.shape, rate, np.random.SFC64(seed)), scale(rate))


def kept(shape: tuple[int, ...], rate: float, bits: np.random.SFC64) -> Tensor:
    """Bools, False at the chance `rate` as far as `STEPS` can say it."""
    count = math.prod(shape)
    words = np.atleast_1d(bits.random_raw(-(-count // 4)))
    return torch.from_numpy(words.view(np.uint16)[:count] >= _threshold(rate)).view(shape)


def scale(rate: float) -> float:
    """What makes up for what `kept` leaves out."""
    return STEPS / (STEPS - _threshold(rate))


def _threshold(rate: float) -> int:
    return min(round(rate * STEPS), STEPS - 1)


class Dropout(nn.Dropout):
    """As torch's."""

    def forward(self, x: Tensor) -> Tensor:
        """x * kept / (1 - p) while training, x otherwise."""
        return dropout(x, self.p, self.training)


class _Dropped(torch.autograd.Function):
    """x where `mask`, scaled: the gradient is treated alike."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, mask: Tensor, factor: float) -> Tensor:
        """y = factor * mask * x."""
        ctx.save_for_backward(mask)
        ctx.factor = factor  # type: ignore[attr-defined]
        return torch.where(mask, x, 0.0).mul_(factor)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        """grad_x = factor * mask * grad."""
        (mask,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return torch.where(mask, grad, 0.0).mul_(ctx.factor), None, None  # type: ignore[attr-defined]
