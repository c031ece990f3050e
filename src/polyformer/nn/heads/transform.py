"""Layers before the last layer in the heads of ModernBERT and BigBird."""

import dataclasses

from torch import Tensor, nn

from polyformer.core.config import Config
from polyformer.core.ops.layers import ActivationName, Dropout, activation
from polyformer.core.ops.linear import Linear
from polyformer.core.ops.norms import LayerNorm
from polyformer.core.ranges import PositiveFloat, PositiveInt, Probability


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformConfig(Config):
    """The transform norm(act(W h)), as before BERT's vocabulary, here without biases. Warner et al. 2024."""

    activation: ActivationName = "gelu"
    eps: PositiveFloat = 1e-5  # of the norm
    dense_bias: bool = False
    norm_bias: bool = False

    def build(self, width: int) -> "Transform":
        """Return the module for vectors of a width."""
        return Transform(width, self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResidualConfig(Config):
    """The layer norm(h + W_2 act(W_1 h)), a feed-forward layer as in BERT, before the last layer of BigBird's
    question answering. Zaheer et al. 2020, appendix E.2 (question answering)."""

    intermediate_size: PositiveInt = 3072
    activation: ActivationName = "gelu"
    eps: PositiveFloat = 1e-12  # of the norm
    dropout: Probability = 0.1  # of h before W_1, and of the term that is added to h

    def build(self, width: int) -> "ResidualTransform":
        """Return the module for vectors of a width."""
        return ResidualTransform(width, self)


class ResidualTransform(nn.Module):
    """A feed-forward layer with a residual connection: x [..., E] -> [..., E]."""

    def __init__(self, width: int, config: ResidualConfig):
        super().__init__()
        self.up, self.down = Linear(width, config.intermediate_size), Linear(config.intermediate_size, width)
        self.activation = activation(config.activation)
        self.norm = LayerNorm(width, eps=config.eps)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return norm(x + W_2 act(W_1 x))."""
        # Post-norm, as in BERT's layers: the norm is of the residual sum.
        return self.norm(x + self.dropout(self.down(self.activation(self.up(self.dropout(x))))))


class Transform(nn.Module):
    """A linear layer with an activation and a norm: x [..., E] -> [..., E]."""

    def __init__(self, width: int, config: TransformConfig):
        super().__init__()
        self.dense = Linear(width, width, bias=config.dense_bias)
        self.activation = activation(config.activation)
        self.norm = LayerNorm(width, eps=config.eps, bias=config.norm_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return norm(act(W x))."""
        return self.norm(self.activation(self.dense(x)))


def build_transform(config: TransformConfig | ResidualConfig | None, width: int) -> nn.Module:
    """Return the module, or the identity if `config` is None."""
    return nn.Identity() if config is None else config.build(width)
