"""Cosines and sines together, by the library that is faster on this machine.

torch uses MKL, with vector code for the processors of one vendor; on others numpy takes a third of the time.
There is a choice only for float32 on a CPU; both are exact up to the second to last bit.
"""

import dataclasses
import functools
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from polyformer.core.config import Config
from polyformer.core.ops.tuning import Section
from polyformer.core.ops.tuning.stopwatch import least_seconds

TRIED = 1 << 14
"""The number of angles in a measurement."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sines(Config):
    """The library for cosines and sines of float32."""

    library: Literal["torch", "numpy"] = "torch"


def cosines_and_sines(a: Tensor) -> Tensor:
    """Return [cos a, sin a]: a [..., M] -> [..., 2 M]; not differentiable."""
    out = a.new_empty(*a.shape[:-1], 2 * a.shape[-1])
    # A subclass of Tensor, such as a fake tensor, has no data for numpy.
    plain = type(a) is Tensor and a.device.type == "cpu" and a.dtype == torch.float32
    _write(out, a, SECTION().library if plain else "torch")
    return out


def _write(out: Tensor, a: Tensor, library: str) -> None:
    cos, sin = out.chunk(2, -1)
    if library == "torch":
        torch.cos(a, out=cos)
        torch.sin(a, out=sin)
        return
    with np.errstate(invalid="ignore"):  # the result for infinity is NaN
        np.cos(a.numpy(), out=cos.numpy())
        np.sin(a.numpy(), out=sin.numpy())


def _measure() -> Sines:
    a = torch.linspace(-20, 20, TRIED).view(-1, 128)
    out = a.new_empty(len(a), 256)
    calls = {name: functools.partial(_write, out, a, name) for name in ("numpy", "torch")}
    seconds = least_seconds(calls, rounds=8)
    return Sines(library="numpy" if seconds["numpy"] < seconds["torch"] else "torch")


SECTION = Section("sines", Sines(), _measure)
