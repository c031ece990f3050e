"""The interface of exit rules."""

import dataclasses
from collections.abc import Callable

from torch import Tensor, nn

from polyformer.core.config import Config
from polyformer.nn.depth.base import ExitLoss


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExitRuleConfig(Config):
    """The base class of rules: `build(hidden_size, exits)` returns the module; the end is an exit."""

    def build(self, hidden_size: int, exits: int) -> "ExitRule":
        """Return the module with new weights."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, eq=False)
class Candidates:
    """The tokens that may leave at exit `number`, counted from 0.

    state, previous: [1, N, E], the outputs of the exit's layer and of the layer below. hidden: [1, N, E], the
    input of the head if they leave. predict: the head's predictions. features: of these tokens, [N, X], if
    the rule has `token_features` or `source_features`.
    """

    number: int
    state: Tensor
    previous: Tensor
    hidden: Tensor
    predict: Callable[[Tensor], Tensor] | None
    features: Tensor | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class ExitTrajectory:
    """A training text that ran through all layers: states [B, T, E] after every exit's layer, and the head's
    input for each, both including the end. features: as for `Candidates`, [B, T, X]."""

    states: list[Tensor]
    hidden: list[Tensor]
    exit_loss: ExitLoss
    features: Tensor | None = None


def top_gap(logits: Tensor) -> Tensor:
    """Return p_(1) - p_(2) [N] of logits [N, V]: the gap between the two likeliest tokens."""
    # float32: in bfloat16 both probabilities may round to the same number.
    likeliest = logits.float().softmax(-1).topk(2, -1).values
    return likeliest[:, 0] - likeliest[:, 1]


class ExitRule(nn.Module):
    """The confidence of a prediction. `reads_source`: whether the rule needs an encoder-decoder's source."""

    reads_source = False

    def token_features(self, state: Tensor) -> Tensor | None:
        """Return the features [B, T, X] of the states [B, T, E] after the first layer, or None."""
        return None

    def source_features(self, source: Tensor, valid: Tensor | None) -> Tensor | None:
        """Return the features [B, X] of the source [B, S, E], which is real where `valid` [B, S], or None."""
        return None

    def confidence(self, candidates: Candidates) -> Tensor:
        """Return the confidence [N], from 0 to 1."""
        raise NotImplementedError

    def loss(self, trajectory: ExitTrajectory) -> Tensor | None:
        """Return the rule's training loss, a scalar; None if it learns nothing."""
        return None
