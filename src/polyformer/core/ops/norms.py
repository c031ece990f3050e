"""Norms: of each token over channels (LayerNorm, RMSNorm), of each channel over tokens (BatchNorm).

`dynamic_tanh` is an element-wise function in the place of a norm.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.core.config import Config
from polyformer.core.parts import parameter
from polyformer.core.ranges import PositiveFloat, PositiveShare


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormConfig(Config):
    """Family of norms: `build(width)` makes the module.

    `tokenwise`: whether the output of a token depends on that token only.
    """

    option: ClassVar[str] = "model.norm"
    tokenwise: ClassVar[bool] = True

    def build(self, width: int) -> nn.Module:
        """Return the module for vectors [..., width]."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerNormConfig(NormConfig):
    """Layer normalisation: each vector is shifted to mean 0 and scaled to variance 1.

    (x - mean) / sqrt(var + eps) * weight + bias.
    """

    eps: PositiveFloat = 1e-5
    bias: bool = True

    kind: ClassVar[str] = "layer"
    paper: ClassVar[str] = "Ba et al. 2016, equation 4"

    @classmethod
    def examples(cls) -> tuple["LayerNormConfig", ...]:
        """Return a norm with and a norm without a bias."""
        return cls(), cls(bias=False)

    def build(self, width: int) -> nn.Module:
        """Return torch's layer norm, see `LayerNorm`."""
        return LayerNorm(width, eps=self.eps, bias=self.bias)


class LayerNorm(nn.LayerNorm):
    """torch's layer norm with gradients that are finite in float16.

    torch's kernel for CPUs keeps 1 / sqrt(var + eps) in the type of the input. In float16 it is infinite
    for a vector of equal numbers, such as zeros at padding, if eps is 1e-10 or less: gradients are NaN.
    """

    weight: Tensor = parameter()
    bias: Tensor = parameter()

    def forward(self, input: Tensor) -> Tensor:
        """Return (x - mean) / sqrt(var + eps) * weight + bias of x [..., width].

        Of x in float32 with weights in half precision, the type of the weights.
        """
        weight, bias, dtype = self.weight, self.bias, input.dtype
        if dtype == weight.dtype and dtype != torch.float16:
            return torch.layer_norm(input, self.normalized_shape, weight, bias, self.eps)
        wider = dtype == torch.float32 != weight.dtype != torch.float64
        if not wider and (dtype != torch.float16 or not input.is_cpu):
            return torch.layer_norm(input, self.normalized_shape, weight, bias, self.eps)
        own = weight.dtype if wider else dtype
        weight, bias = (None if x is None else x.float() for x in (weight, bias))
        return F.layer_norm(input.float(), self.normalized_shape, weight, bias, self.eps).to(own)

    def plain_function(self) -> Callable[[Tensor], Tensor]:
        """Return `forward` of x, shorter for a type that x shares with the weights, and not float16."""
        if type(self) is not LayerNorm:
            return self.forward
        own: Any = self._parameters

        def normed(x: Tensor) -> Tensor:
            weight = own["weight"]
            if x.dtype != weight.dtype or x.dtype == torch.float16:
                return self.forward(x)
            return torch.layer_norm(x, self.normalized_shape, weight, own["bias"], self.eps)

        return normed


@dataclasses.dataclass(frozen=True, kw_only=True)
class RMSNormConfig(NormConfig):
    """RMS normalisation: each vector is divided by its root mean square.

    x / sqrt(mean(x^2) + eps) * weight.

    `centered`: the weight is stored minus 1, as in Gemma, so that weight decay pulls the factor to 1.
    """

    eps: PositiveFloat = 1e-5
    centered: bool = False

    kind: ClassVar[str] = "rms"
    paper: ClassVar[str] = "Zhang and Sennrich 2019, equation 4"

    @classmethod
    def examples(cls) -> tuple["RMSNormConfig", ...]:
        """Return norms with both forms of the weight."""
        return cls(), cls(centered=True)

    def build(self, width: int) -> nn.Module:
        """Return torch's RMS norm, see `RMSNorm`, or the form with a centered weight."""
        return CenteredRMSNorm(width, eps=self.eps) if self.centered else RMSNorm(width, eps=self.eps)


class RMSNorm(nn.RMSNorm):
    """torch's RMS norm, faster for single tokens, where torch's many steps take as long as a product."""

    weight: Tensor = parameter()

    def forward(self, x: Tensor) -> Tensor:
        """Return x / sqrt(mean(x^2) + eps) * weight, for x [..., width], in the type of the weight."""
        if self.eps is not None and self._is_plain(x):
            width, length = x.shape[-1], torch.linalg.vector_norm(x, 2, -1, True)
            rms = torch.hypot(length, x.new_full((), (width * self.eps) ** 0.5)).mul_(width**-0.5)
            return (x / rms).mul_(self.weight)
        if x.dtype == self.weight.dtype:
            return super().forward(x)
        # Half precision with a weight in float32, as under autocast, or a residual stream that is wider than
        # the weights. torch warns of such pairs.
        wide = torch.promote_types(x.dtype, self.weight.dtype)
        normed = F.rms_norm(x.to(wide), self.normalized_shape, self.weight.to(wide), self.eps)
        return normed.to(self.weight.dtype)

    def _is_plain(self, x: Tensor) -> bool:
        """Return whether the step-by-step definition is faster: in float32 on a CPU, outside autograd."""
        return (
            not torch.is_grad_enabled()
            and x.dtype == self.weight.dtype == torch.float32
            and x.is_cpu
            and not torch.compiler.is_compiling()
            and torch._C._get_tracing_state() is None
            and not torch._C._are_functorch_transforms_active()
        )


class CenteredRMSNorm(RMSNorm):
    """RMS norm with the factor 1 + weight, which half precision keeps more exactly than a weight near 1."""

    def reset_parameters(self) -> None:
        """Set the weight to 0, for a factor of 1."""
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return x / sqrt(mean(x^2) + eps) * (1 + weight) of x [..., width], computed in at least float32."""
        wide = torch.promote_types(torch.promote_types(x.dtype, self.weight.dtype), torch.float32)
        factor = 1 + self.weight.to(wide)
        return F.rms_norm(x.to(wide), self.normalized_shape, factor, self.eps).to(self.weight.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchNormConfig(NormConfig):
    """Batch normalisation: each channel is normalised over the tokens of the batch.

    (x - mean_c) / sqrt(var_c + eps) * weight + bias, for each channel c over all tokens except padding.

    Training uses the mean and variance of the batch, evaluation uses running averages, updated by each batch:
    running = (1 - momentum) running + momentum batch.

    So in training a token depends on all other tokens of its batch, including other texts and its future. A
    causal model is causal only in evaluation, where K2 to K5 hold; its training loss may be lower than its
    true loss. A batch computed in parts (gradient accumulation, several processes) has statistics for each
    part, and the running averages are the first process's: two processes do not compute the same as one.
    Fewer than two tokens have no statistics; the running averages are then used and do not change.
    """

    eps: PositiveFloat = 1e-5
    momentum: PositiveShare = 0.1

    kind: ClassVar[str] = "batch"
    paper: ClassVar[str] = "Ioffe and Szegedy 2015, algorithms 1 and 2"
    tokenwise: ClassVar[bool] = False

    def build(self, width: int) -> nn.Module:
        """Return the module with weights and running statistics of `width` channels."""
        return BatchNorm(width, self)


class BatchNorm(nn.Module):
    """The module of `BatchNormConfig`; `running_mean` and `running_var` (unbiased) [E] are saved."""

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
        """Return the normalised x [B, T, E], and in training update the running statistics.

        real: [B, T] bool, False for padding. Computed in at least float32.
        """
        dtype = torch.promote_types(x.dtype, self.weight.dtype)
        x = x.to(torch.promote_types(dtype, torch.float32))
        # NaN at padding must not reach the gradients of mean and variance.
        if real is not None and self.training:
            x = x.masked_fill(~real.unsqueeze(-1), 0)
        mean, var = self._of_batch(x, real) if self.training else (self.running_mean, self.running_var)
        return ((x - mean) * (var + self.eps).rsqrt() * self.weight + self.bias).to(dtype)

    def _of_batch(self, x: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the mean and biased variance [E] of the real tokens, and update the running statistics."""
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicTanhConfig(NormConfig):
    """Dynamic tanh (DyT): a learned tanh in the place of a norm, without any statistics.

    tanh(alpha x) * weight + bias.

    The tanh bounds each channel separately, as a norm of vectors with some very large channels does.
    Deviation: none of the function. For language models the paper also multiplies embeddings by a learned
    factor, initially sqrt(E); the option `embedding.scaled` has that factor, not learned.

    `alpha`: the first value of alpha, which all channels share. The paper finds that wide language models
    need smaller values, and larger ones before attention than elsewhere (section 7.2).
    """

    alpha: PositiveFloat = 0.5

    kind: ClassVar[str] = "dynamic_tanh"
    paper: ClassVar[str] = "Zhu et al. 2025 (Transformers without Normalization), section 4"

    def build(self, width: int) -> nn.Module:
        """Return the module with a weight and a bias of `width` channels."""
        return DynamicTanh(width, self)


class DynamicTanh(nn.Module):
    """The module of `DynamicTanhConfig`: alpha [1], weight and bias [E]."""

    def __init__(self, width: int, config: DynamicTanhConfig):
        super().__init__()
        self.alpha = nn.Parameter(torch.full((1,), config.alpha))
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return tanh(alpha x) * weight + bias of x [..., E], in the type of the weight."""
        # Under autocast x is in half precision; a residual stream may be wider than the weights.
        wide = torch.promote_types(x.dtype, self.weight.dtype)
        bounded = torch.tanh(self.alpha.to(wide) * x.to(wide))
        return (bounded * self.weight + self.bias).to(self.weight.dtype)


def normalize(norm: nn.Module, x: Tensor, real: Tensor | None) -> Tensor:
    """Return norm(x) for x [B, T, E]; `BatchNorm` leaves out padding, where `real` [B, T] is False."""
    return norm(x, real) if isinstance(norm, BatchNorm) else norm(x)
