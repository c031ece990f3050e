"""What every feed-forward has in common."""

import dataclasses
from typing import ClassVar

from torch import Tensor, nn

from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.state import State
from polyformer.ops.activations import activation
from polyformer.sequence.context import Context


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeedForwardConfig(Config):
    """Family of feed-forwards: `build(hidden_size)` makes the module.

    `tokenwise` says that what it makes of a token depends on that token alone; `stateful` that in decoding
    it reads what it kept of earlier tokens; `exchanges` that it asks other processes for what it needs of
    their tokens, where a sequence is spread over them.
    """

    tokenwise: ClassVar[bool] = True
    stateful: ClassVar[bool] = False
    exchanges: ClassVar[bool] = False

    def build(self, hidden_size: int) -> "FeedForward":
        """The module, in a model of `hidden_size`."""
        raise NotImplementedError

    def at(self, layer: int) -> "FeedForwardConfig":
        """What layer `layer` of a stack has; the same in all, unless the member says otherwise."""
        return self


@dataclasses.dataclass(frozen=True, kw_only=True)
class SizedConfig(FeedForwardConfig):
    """Those that have an inner layer of their own."""

    intermediate_size: int = 2048
    activation: str = "relu"
    bias: bool = True
    inner_dropout: float = 0.0  # of the inner layer, activated

    def __post_init__(self) -> None:
        activation(self.activation)
        if not 0.0 <= self.inner_dropout < 1.0:
            raise InputError(f"inner_dropout: expected a probability in [0, 1), got {self.inner_dropout}")
        if self.intermediate_size < 1:
            raise InputError(f"intermediate_size: expected 1 or more, got {self.intermediate_size}")


class FeedForward(nn.Module):
    """x [..., E] -> [..., E]."""

    def new_state(self) -> State | None:
        """What it has kept before the first token; None for a member that keeps nothing."""
        return None

    def forward(
        self, x: Tensor, context: Context | None = None, state: State | None = None
    ) -> Tensor | tuple[Tensor, State]:
        """`context`: where the tokens x [B, T, E] stand, its queries, for what tells real ones apart. With a
        `state`, which a member is given that has one, the next state too."""
        raise NotImplementedError
