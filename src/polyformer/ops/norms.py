"""Normalisation over the model width: LayerNorm and RMSNorm."""

import dataclasses
from typing import ClassVar

from torch import nn

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
        return nn.RMSNorm(width, eps=self.eps)
