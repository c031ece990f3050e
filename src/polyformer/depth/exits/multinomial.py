"""Rules that choose the exit beforehand: for a token by its first layer, for a sequence by its source.

    q(n) = softmax(W h + b)_n        h = h_1 of the token, or the mean of the encoder's output

A token leaves at the likeliest exit (`greedy`), as in the paper, or where q(1) + ... + q(n) reaches the
threshold, which lets one trained rule give any speed. Elbayad et al. 2020, sections 4.1 and 4.2.
"""

import dataclasses
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.core.errors import InputError
from polyformer.depth.exits.base import Candidates, Course, ExitRule, ExitRuleConfig
from polyformer.depth.exits.oracles import OracleConfig
from polyformer.ops.pooling import pool


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultinomialConfig(ExitRuleConfig):
    """For every token, by its state after the first layer."""

    oracle: OracleConfig = OracleConfig()
    greedy: bool = False

    kind: ClassVar[str] = "multinomial"
    paper: ClassVar[str] = "Elbayad et al. 2020, section 4.2"

    def build(self, hidden_size: int, exits: int) -> "Multinomial":
        """One matrix."""
        return Multinomial(self, hidden_size, exits)


class Multinomial(ExitRule):
    """q(n) of the token."""

    def __init__(self, config: "MultinomialConfig | SequenceConfig", hidden_size: int, exits: int):
        super().__init__()
        self.config = config
        self.choice = nn.Linear(hidden_size, exits)

    def first(self, state: Tensor) -> Tensor:
        """The logits of q."""
        return self.choice(state)

    def confidence(self, candidates: Candidates) -> Tensor:
        """q(1) + ... + q(n), or 1 from the likeliest exit on."""
        assert candidates.kept is not None
        if self.config.greedy:
            return (candidates.kept.argmax(-1) <= candidates.number).to(candidates.kept.dtype)
        return candidates.kept.softmax(-1).cumsum(-1)[:, candidates.number]

    def loss(self, course: Course) -> Tensor:
        """Cross-entropy with the oracle's exits."""
        assert course.kept is not None
        labelled = course.judge.labelled
        best = self.config.oracle.exits(course)
        terms = F.cross_entropy(course.kept.flatten(0, 1), best.flatten(), reduction="none")
        return (terms.view(labelled.shape) * labelled).sum() / labelled.sum().clamp_min(1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceConfig(ExitRuleConfig):
    """For all tokens of a translation alike, by the mean of its source."""

    oracle: OracleConfig = OracleConfig()
    greedy: bool = False

    kind: ClassVar[str] = "sequence"
    paper: ClassVar[str] = "Elbayad et al. 2020, section 4.1"

    def build(self, hidden_size: int, exits: int) -> "Sequence":
        """One matrix."""
        return Sequence(self, hidden_size, exits)


class Sequence(Multinomial):
    """q(n) of the source."""

    reads_source = True

    def first(self, state: Tensor) -> None:
        """Nothing."""
        return

    def read(self, source: Tensor | None, valid: Tensor | None) -> Tensor:
        """The logits of q."""
        if source is None:
            raise InputError(
                "depth.rule: 'sequence' reads the source of an encoder-decoder; use 'multinomial'"
            )
        return self.choice(pool(source, valid, "mean"))

    def loss(self, course: Course) -> Tensor:
        """Cross-entropy with the oracle's exits of whole sequences."""
        assert course.kept is not None
        return F.cross_entropy(course.kept[:, 0], self.config.oracle.exits(course, whole=True))
