"""What every rule of when to exit has in common."""

import dataclasses
from collections.abc import Callable

from torch import Tensor, nn

from polyformer.core.config import Config
from polyformer.depth.base import Judge


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExitRuleConfig(Config):
    """Family of rules: `build(hidden_size, exits)` makes the module of a stack with so many ways out, the
    end among them.
    """

    def build(self, hidden_size: int, exits: int) -> "ExitRule":
        """The module with new weights."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, eq=False)
class Candidates:
    """The tokens that may leave by exit number `number`, counted from 0.

    state, before: [1, N, E], the outputs of the exit's layer and of the one below. hidden: [1, N, E], what
    the head would read. predict: its predictions. kept: what the rule made of the first layer's states for
    these tokens, [N, X], or of the source, where it did.
    """

    number: int
    state: Tensor
    before: Tensor
    hidden: Tensor
    predict: Callable[[Tensor], Tensor] | None
    kept: Tensor | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Course:
    """A text in training, which ran to the end: states [B, T, E] after every exit's layer, and what the head
    would read there, the end among both. kept: as for `Candidates`, [B, T, X]."""

    states: list[Tensor]
    hidden: list[Tensor]
    judge: Judge
    kept: Tensor | None = None


class ExitRule(nn.Module):
    """How far a prediction can be trusted. `reads_source`: whether it needs an encoder-decoder's source."""

    reads_source = False

    def first(self, state: Tensor) -> Tensor | None:
        """What it makes of the states [B, T, E] after the first layer, [B, T, X]; None where nothing."""
        return None

    def read(self, source: Tensor, valid: Tensor | None) -> Tensor | None:
        """What it makes of the source [B, S, E], real where `valid` [B, S], [B, X]; None where nothing."""
        return None

    def confidence(self, candidates: Candidates) -> Tensor:
        """[N], from 0 to 1."""
        raise NotImplementedError

    def loss(self, course: Course) -> Tensor | None:
        """Its training loss, a scalar; None where it learns nothing."""
        return None
