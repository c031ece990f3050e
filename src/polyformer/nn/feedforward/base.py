"""Base of the feed-forwards."""

import dataclasses
from typing import ClassVar

from torch import Tensor, nn

from polyformer.core.config import Config
from polyformer.core.ops.activations import ActivationName
from polyformer.core.ranges import PositiveInt, Probability
from polyformer.core.sequence.context import Context
from polyformer.core.state import State


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeedForwardConfig(Config):
    """Family of feed-forwards: `build(hidden_size)` creates the module.

    `tokenwise`: the output of a token depends only on this token. `stateful`: decoding uses a state of
    earlier tokens. `exchanges`: the module communicates with other processes if a sequence is spread over
    them.
    """

    option: ClassVar[str] = "model.feedforward"
    tokenwise: ClassVar[bool] = True
    stateful: ClassVar[bool] = False
    exchanges: ClassVar[bool] = False

    def build(self, hidden_size: int) -> "FeedForward":
        """Return the module for a model of width `hidden_size`."""
        raise NotImplementedError

    def for_layer(self, layer: int) -> "FeedForwardConfig":
        """Return the configuration of layer `layer` of a stack; by default all layers have the same."""
        return self


@dataclasses.dataclass(frozen=True, kw_only=True)
class SizedConfig(FeedForwardConfig):
    """Base of the feed-forwards with an inner layer of `intermediate_size` channels."""

    intermediate_size: PositiveInt = 2048
    activation: ActivationName = "relu"
    bias: bool = True
    inner_dropout: Probability = 0.0  # of the inner layer, after the activation


class FeedForward(nn.Module):
    """A module that maps x [..., E] to [..., E]."""

    def widen(self) -> None:
        """Return float32 for x in float16 from now on, if the member can: outputs exceed float16's range."""

    def new_state(self) -> State | None:
        """Return the state before the first token; None for a member without a state."""
        return None

    def forward(
        self, x: Tensor, context: Context | None = None, state: State | None = None
    ) -> Tensor | tuple[Tensor, State]:
        """Return the output for x [B, T, E], and with a `state` (of a stateful member) also the next state.

        `context`: describes the tokens of x, which are its queries; it marks padding and documents.
        """
        raise NotImplementedError
