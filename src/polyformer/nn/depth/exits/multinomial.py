"""Rules that choose the exit in advance: for a token from its first layer, for a sequence from its source.

    q(n) = softmax(W h + b)_n        h = h_1 of the token, or the mean of the encoder's output

A token leaves at the likeliest exit (`greedy`), as in the paper, or where q(1) + ... + q(n) reaches the
threshold, so that a single trained rule supports any speed. Elbayad et al. 2020, sections 4.1 and 4.2.
"""

import dataclasses
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.core.errors import InputError
from polyformer.core.ops.pooling import pool
from polyformer.nn.depth.exits.base import Candidates, ExitRule, ExitRuleConfig, ExitTrajectory
from polyformer.nn.depth.exits.oracles import OracleConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultinomialConfig(ExitRuleConfig):
    """Multinomial exit: the state after the first layer predicts the exit of each token."""

    oracle: OracleConfig = OracleConfig()
    greedy: bool = False

    kind: ClassVar[str] = "multinomial"
    paper: ClassVar[str] = "Elbayad et al. 2020, section 4.2"

    def build(self, hidden_size: int, exits: int) -> "Multinomial":
        return Multinomial(self, hidden_size, exits)


class Multinomial(ExitRule):
    """The distribution q(n) of a token."""

    def __init__(self, config: MultinomialConfig, hidden_size: int, exits: int):
        super().__init__()
        self.config = config
        self.choice = nn.Linear(hidden_size, exits)

    def token_features(self, state: Tensor) -> Tensor:
        """Return the logits of q."""
        return self.choice(state)

    def confidence(self, candidates: Candidates) -> Tensor:
        """Return q(1) + ... + q(n), or if `greedy` 1 from the likeliest exit on, else 0."""
        assert candidates.features is not None
        if self.config.greedy:
            return (candidates.features.argmax(-1) <= candidates.number).to(candidates.features.dtype)
        # A cumulative probability, so that the threshold can lower the depth after training.
        return candidates.features.softmax(-1).cumsum(-1)[:, candidates.number]

    def loss(self, trajectory: ExitTrajectory) -> Tensor:
        """Return the cross-entropy with the oracle's exits."""
        assert trajectory.features is not None
        labelled = trajectory.exit_loss.labelled
        # The label is the best exit in hindsight, for every token [B, T].
        best = self.config.oracle.exits(trajectory)
        terms = F.cross_entropy(trajectory.features.flatten(0, 1), best.flatten(), reduction="none")
        return (terms.view(labelled.shape) * labelled).sum() / labelled.sum().clamp_min(1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceConfig(MultinomialConfig):
    """Sequence exit: the mean of the encoder's output predicts one exit for the whole translation."""

    kind: ClassVar[str] = "sequence"
    paper: ClassVar[str] = "Elbayad et al. 2020, section 4.1"

    def build(self, hidden_size: int, exits: int) -> "Sequence":
        return Sequence(self, hidden_size, exits)


class Sequence(Multinomial):
    """The distribution q(n) of a source."""

    reads_source = True

    def token_features(self, state: Tensor) -> None:
        """Return None."""
        return

    def source_features(self, source: Tensor | None, valid: Tensor | None) -> Tensor:
        """Return the logits of q."""
        if source is None:
            raise InputError(
                "depth.rule: 'sequence' reads the source of an encoder-decoder; use 'multinomial'"
            )
        return self.choice(pool(source, valid, "mean"))

    def loss(self, trajectory: ExitTrajectory) -> Tensor:
        """Return the cross-entropy with the oracle's exits of whole sequences."""
        assert trajectory.features is not None
        # All tokens of a text share one exit, so its features have a single row.
        return F.cross_entropy(
            trajectory.features[:, 0], self.config.oracle.exits(trajectory, per_sequence=True)
        )
