"""Normalisation over the model width: LayerNorm and RMSNorm."""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor, nn

from polyformer.core.config import Config
from polyformer.core.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormConfig(Config):
    """Family of norms: `build(width)` makes the module."""

    eps: float = 1e-5

    def __post_init__(self) -> None:
        if not self.eps > 0:
            raise InputError(f"eps: expected a positive number, got {self.eps}")

    def build(self, width: int) -> nn.Module:
        """The module for vectors [..., width]."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerNormConfig(NormConfig):
    """(x - mean) / sqrt(var + eps) * weight + bias."""

    bias: bool = True

    kind: ClassVar[str] = "layer"
    paper: ClassVar[str] = "Ba et al. 2016, equation 4"

    @classmethod
    def examples(cls) -> tuple["LayerNormConfig", ...]:
        """With and without a bias."""
        return cls(), cls(bias=False)

    def build(self, width: int) -> nn.Module:
        """torch's layer norm."""
        return nn.LayerNorm(width, eps=self.eps, bias=self.bias)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RMSNormConfig(NormConfig):
    """x / sqrt(mean(x^2) + eps) * weight."""

    kind: ClassVar[str] = "rms"
    paper: ClassVar[str] = "Zhang and Sennrich 2019, equation 4"

    def build(self, width: int) -> nn.Module:
        """torch's RMS norm."""
        return RMSNorm(width, eps=self.eps)


class RMSNorm(nn.RMSNorm):
    """As torch's, whose many steps take as long for the vector of one token as a product does."""

    def forward(self, x: Tensor) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight, of x [..., width]."""
        if self.eps is not None and self._is_plain(x):
            width, length = x.shape[-1], torch.linalg.vector_norm(x, 2, -1, True)
            rms = torch.hypot(length, x.new_full((), (width * self.eps) ** 0.5)).mul_(width**-0.5)
            return (x / rms).mul_(self.weight)
        return super().forward(x)

    def _is_plain(self, x: Tensor) -> bool:
        """Whether the definition, step by step, is faster: in single precision on a CPU, outside autograd."""
        return (
            not torch.is_grad_enabled()
            and x.dtype == self.weight.dtype == torch.float32
            and x.is_cpu
            and not torch.compiler.is_compiling()
            and torch._C._get_tracing_state() is None
            and not torch._C._are_functorch_transforms_active()
        )
