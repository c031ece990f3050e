"""Small operations of layers: activations, pooling, depthwise convolution, dropout and auxiliary losses.

Dropout has cheap random numbers on a CPU: 16 bits per element, from numpy's SFC64. torch draws one number
after another, 10 nanoseconds each, which takes a seventh of a training step of BERT; SFC64 draws four numbers
in half of that time. The probability is rounded to a multiple of 1 / 65536, and kept elements are scaled by
exactly that probability, so the mean is unchanged. The seed comes from torch's generator, so runs with the
same torch seed are reproducible.

Auxiliary losses are terms that layers add to the training loss. A layer names a term, the model collects it:

    with collect_auxiliary_losses() as losses:  # around the stacks, in the model
        ...
            add_auxiliary_loss("span", term)    # anywhere inside

A layer computes its term even if nobody collects it, so that recomputed activations are the same. Each thread
has separate collectors, in a plain list, which can be traced into a graph.
"""

import math
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from polyformer.core.errors import InputError, unknown


def quick_gelu(x: Tensor) -> Tensor:
    """Return x sigmoid(1.702 x), an approximation of GELU (Hendrycks and Gimpel 2016, section 2)."""
    return x * torch.sigmoid(1.702 * x)


def squared_relu(x: Tensor) -> Tensor:
    """Return max(x, 0)^2 (So et al. 2021, Primer)."""
    return F.relu(x).square()


ActivationName = Literal["relu", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh", "quick_gelu", "squared_relu"]
"""The type of an option that names an activation."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "quick_gelu": quick_gelu,
    "squared_relu": squared_relu,
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """Return the function called `name`; raises `InputError` with the nearest names."""
    if name not in ACTIVATIONS:
        raise unknown("activation", name, ACTIVATIONS)
    return ACTIVATIONS[name]


Pooling = Literal["first", "last", "mean", "max"]
"""The type of an option that names a pooling."""


def pool(hidden: Tensor, mask: Tensor | None, how: str) -> Tensor:
    """Return hidden [B, T, E] pooled to [B, E]; T >= 1, `mask` [B, T] is True for real tokens."""
    if not hidden.shape[1]:
        raise InputError("input_ids: pooling needs at least 1 token per text, got none")
    if mask is None:
        wholes = {"first": lambda: hidden[:, 0], "last": lambda: hidden[:, -1], "max": lambda: hidden.amax(1)}
        return wholes.get(how, lambda: hidden.mean(1))()
    if how == "max":  # zeros for a text without real tokens, as for the mean
        most = hidden.masked_fill(~mask.unsqueeze(2), -torch.inf).amax(1)
        return most.masked_fill(~mask.any(1, keepdim=True), 0.0)
    if how == "mean":
        weight = mask.to(hidden.dtype)
        return torch.einsum("bte,bt->be", hidden, weight) / weight.sum(1, keepdim=True).clamp_min(1)
    order = torch.arange(mask.shape[1], device=mask.device)
    first = torch.where(mask, order, mask.shape[1]).amin(1)
    index = first if how == "first" else torch.where(mask, order, -1).amax(1)
    # A text without real tokens has none of the two: any token serves.
    index = index.clamp(0, mask.shape[1] - 1)
    # A graph keeps the number of rows variable in `shape`, and not in `len`.
    return hidden[torch.arange(hidden.shape[0], device=hidden.device), index]


def without_first(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """Return which tokens [B, T] are real and not the first, or the only one of their text."""
    valid = hidden.new_ones(hidden.shape[:2], dtype=torch.bool) if mask is None else mask
    later = valid & (valid.cumsum(1) > 1)
    return torch.where(later.any(1, keepdim=True), later, valid)


def depthwise_convolution(
    x: Tensor,
    taps: Tensor,
    causal: bool,
    valid: Tensor | None = None,
    doc: Tensor | None = None,
    past: Tensor | None = None,
    past_doc: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return y [B, T, E] of x [B, T, E], and the last w - 1 tokens with their documents, for the next call.

        y_t = sum_o taps_o x_(t + o)        o from 1 - w to 0, or from -(w - 1) // 2 to w // 2 if not causal

    taps: [w, E]. Tokens beyond the text, padding and other documents count as zeros. valid: [B, T], False for
    padding. doc: [B, T], documents. past: the tokens before x, at most w - 1, and their documents `past_doc`;
    None for document 0.
    """
    width, length = len(taps), x.shape[1]
    if valid is not None:
        x = x.masked_fill(~valid.bool().unsqueeze(-1), 0)
    if doc is not None:
        doc = doc.expand(len(x), -1)
    before = 0 if past is None else past.shape[1]
    if past is not None and doc is not None:
        doc = torch.cat([doc.new_zeros(len(x), before) if past_doc is None else past_doc, doc], 1)
    # A causal convolution reads only backwards; otherwise it is centred.
    left = width - 1 if causal else (width - 1) // 2
    earlier = x[:, :0] if past is None else past.to(x.dtype)
    padded = torch.cat([F.pad(earlier, (0, 0, left - before, 0)), x], 1)
    if not causal:
        padded = F.pad(padded, (0, 0, 0, width - 1 - left))
    # Numbers beyond the text do not matter: `padded` is zero there.
    numbers = None if doc is None else F.pad(doc, (left - before, width - 1 - left))
    # A sum over w shifted copies.
    y = None
    for tap in range(width):
        neighbours = padded[:, tap : tap + length]
        if doc is not None and numbers is not None:
            same = numbers[:, tap : tap + length] == doc[:, before:]
            neighbours = neighbours.masked_fill(~same.unsqueeze(-1), 0)
        y = neighbours * taps[tap] if y is None else y.addcmul_(neighbours, taps[tap])
    assert y is not None
    kept = min(width - 1, before + length)
    tokens = padded[:, left + length - kept : left + length]
    return y, tokens, None if doc is None else doc[:, before + length - kept :]


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


AuxiliaryLosses = dict[str, Tensor]
"""Scalars to add to the loss, by name; terms with the same name, from several layers, are summed."""


class _Collectors(threading.local):
    """The collectors of this thread, with the innermost last."""

    def __init__(self) -> None:
        self.stack: list[AuxiliaryLosses] = []


_collectors = _Collectors()


class _Collection:
    """The context of `collect_auxiliary_losses`; a generator would take longer, in every pass."""

    def __enter__(self) -> AuxiliaryLosses:
        losses: AuxiliaryLosses = {}
        _collectors.stack.append(losses)
        return losses

    def __exit__(self, *error: object) -> None:
        _collectors.stack.pop()


def collect_auxiliary_losses() -> AbstractContextManager[AuxiliaryLosses]:
    """Collect the terms that this thread adds inside; an inner collector does not pass its terms on."""
    return _Collection()


def add_auxiliary_loss(name: str, term: Tensor) -> None:
    """Add the scalar `term` to the innermost collector of this thread; without a collector it is dropped."""
    if _collectors.stack:
        losses = _collectors.stack[-1]
        losses[name] = losses[name] + term if name in losses else term


def sum_auxiliary_losses(*collected: AuxiliaryLosses) -> AuxiliaryLosses:
    """Return the terms of several collectors, summed by name."""
    with collect_auxiliary_losses() as total:
        for losses in collected:
            for name, term in losses.items():
                add_auxiliary_loss(name, term)
    return total
