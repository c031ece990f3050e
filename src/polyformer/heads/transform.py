"""The layer that ModernBERT's heads have before their last one. Warner et al. 2024."""

import dataclasses

from torch import Tensor, nn

from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.ops.activations import activation
from polyformer.ops.linear import Linear


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformConfig(Config):
    """norm(act(W h)), as before BERT's vocabulary, here without biases."""

    activation: str = "gelu"
    eps: float = 1e-5  # of the norm
    dense_bias: bool = False
    norm_bias: bool = False

    def __post_init__(self) -> None:
        activation(self.activation)
        if not self.eps > 0:
            raise InputError(f"eps: expected a positive number, got {self.eps}")

    def build(self, width: int) -> "Transform":
        """The module for vectors [..., width]."""
        return Transform(width, self)


class Transform(nn.Module):
    """x [..., E] -> [..., E]."""

    def __init__(self, width: int, config: TransformConfig):
        super().__init__()
        self.dense = Linear(width, width, bias=config.dense_bias)
        self.activation = activation(config.activation)
        self.norm = nn.LayerNorm(width, eps=config.eps, bias=config.norm_bias)

    def forward(self, x: Tensor) -> Tensor:
        """norm(act(W x))."""
        return self.norm(self.activation(self.dense(x)))


def build_transform(config: TransformConfig | None, width: int) -> nn.Module:
    """The module, or the identity where there is none."""
    return nn.Identity() if config is None else config.build(width)
