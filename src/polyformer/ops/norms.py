"""Normalisation: of a token over its channels (LayerNorm, RMSNorm), of a channel over tokens (BatchNorm)."""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor, nn

from polyformer.core.config import Config
from polyformer.core.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormConfig(Config):
    """Family of norms: `build(width)` makes the module.

    `tokenwise`: what becomes of a token depends on that token alone.
    """

    tokenwise: ClassVar[bool] = True

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchNormConfig(NormConfig):
    """(x - mean_c) / sqrt(var_c + eps) * weight + bias, of each channel c over all tokens but padding.

    In training mean and variance are those of the batch, in evaluation running ones, of which each batch
    changes a share: running = (1 - momentum) running + momentum batch's.

    So in training a token sees all others of its batch, of other texts and of its own future too. A causal
    model is one in evaluation alone, where K2 to K5 hold; its loss in training may be lower than what it can
    do. A batch computed in parts (accumulated gradients, several processes) has statistics for each part, and
    the running ones are the first process's: two processes do not compute what one does. Of fewer than
    two tokens there are no statistics; the running ones are then used and stay.
    """

    momentum: float = 0.1

    kind: ClassVar[str] = "batch"
    paper: ClassVar[str] = "Ioffe and Szegedy 2015, algorithms 1 and 2"
    tokenwise: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.momentum <= 1.0:
            raise InputError(f"momentum: expected a share in (0, 1], got {self.momentum}")

    def build(self, width: int) -> nn.Module:
        """Weights and running statistics of `width` channels."""
        return BatchNorm(width, self)


class BatchNorm(nn.Module):
    """As `BatchNormConfig` says; `running_mean`, `running_var` (unbiased) [E] are saved with the weights."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, width: int, config: BatchNormConfig):
        super().__init__()
        self.eps, self.momentum = config.eps, config.momentum
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        """Of x [B, T, E]; real: [B, T] bool, the tokens that are not padding, by default all.

        Computed in float32 at least. In training the running statistics go on.
        """
        dtype = torch.promote_types(x.dtype, self.weight.dtype)
        x = x.to(torch.promote_types(dtype, torch.float32))
        if (
            real is not None and self.training
        ):  # NaN at padding must not reach the gradients of mean and variance
            x = x.masked_fill(~real.unsqueeze(-1), 0)
        mean, var = self._of_batch(x, real) if self.training else (self.running_mean, self.running_var)
        return ((x - mean) * (var + self.eps).rsqrt() * self.weight + self.bias).to(dtype)

    def _of_batch(self, x: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
        """Mean and biased variance [E] of the real tokens; the running ones go on by them."""
        rows = x.flatten(0, -2)
        here = torch.ones_like(rows[:, :1], dtype=torch.bool) if real is None else real.reshape(-1, 1)
        count = here.sum()
        least = count.clamp_min(1)
        mean = (rows * here).sum(0) / least
        var = ((rows - mean) * here).square().sum(0) / least
        enough = count > 1
        before = self.running_mean.clone(), self.running_var.clone()
        with torch.no_grad():
            unbiased = var * count / (count - 1).clamp_min(1)
            for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
                running.lerp_(new.to(running.dtype), enough.to(running.dtype) * self.momentum)
        return torch.where(enough, mean, before[0]), torch.where(enough, var, before[1])


def normalize(norm: nn.Module, x: Tensor, real: Tensor | None) -> Tensor:
    """norm(x) of x [B, T, E]; `real` [B, T], the tokens that are not padding, is for a norm of all tokens."""
    return norm(x, real) if isinstance(norm, BatchNorm) else norm(x)
