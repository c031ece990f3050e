"""What every feed-forward has in common."""

import dataclasses

from torch import nn

from polyformer.core.activations import activation
from polyformer.core.config import Config
from polyformer.core.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeedForwardConfig(Config):
    """Family of feed-forwards: `build(hidden_size)` makes a module [..., E] -> [..., E]."""

    intermediate_size: int = 2048
    activation: str = "relu"
    bias: bool = True

    def __post_init__(self) -> None:
        activation(self.activation)
        if self.intermediate_size < 1:
            raise InputError(f"intermediate_size: expected 1 or more, got {self.intermediate_size}")

    def build(self, hidden_size: int) -> nn.Module:
        raise NotImplementedError
