"""The rules of exits, which estimate the confidence of a prediction, and the oracles that train them.

Oracles: the best exits in hindsight, which are the labels of exit classifiers.

With LL_t^n the log-likelihood of the label of token t at exit n, and C_t^n whether the prediction is right,

    n*_t = argmax_n sum_t' kappa(t, t') LL_t'^n - penalty n        kappa(t, t') = exp(-|t - t'|^2 / sigma)

("likelihood"), or with C instead of LL ("correctness"). `sigma` 0 uses only the token itself. For a whole
sequence the sum is over its tokens, with weight 1. Elbayad et al. 2020, sections 4.1 and 4.2.

Other rules use a token's state at the exit: its prediction, its saturation, a learned unit, or the prediction
among the tokens that are predicted most often. The softmax response costs the product with the vocabulary
matrix at every exit, which in a small model is the cost of several layers. A shortlist V' of the vocabulary
reduces this to |V'| / |V|,

    p = softmax(W' x + b')      confidence p_(1) - p_(2)

with x the head's input at the exit, and W' [|V'|, E] and b' the rows of its output matrix and bias for V'.
The tokens of V' are determined from a text: `polyformer convert --fit` (applications/exit_fitting.py). Until
then both are 0, and no token leaves. The rule can be overconfident about predictions outside the shortlist;
calibration accounts for this.

Rules that choose the exit in advance: for a token from its first layer, for a sequence from its source.

    q(n) = softmax(W h + b)_n        h = h_1 of the token, or the mean of the encoder's output

A token leaves at the likeliest exit (`greedy`), as in the paper, or where q(1) + ... + q(n) reaches the
threshold, so that a single trained rule supports any speed. Elbayad et al. 2020, sections 4.1 and 4.2.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge
from torch import Tensor, nn

from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.ops.layers import pool
from polyformer.core.ranges import NonNegativeFloat
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class OracleConfig(Config):
    """The options of an oracle. `penalty`: the cost of each further exit."""

    by: Literal["likelihood", "correctness"] = "likelihood"
    penalty: NonNegativeFloat = 0.1
    sigma: NonNegativeFloat = 0.0

    @torch.no_grad()
    def exits(self, trajectory: ExitTrajectory, per_sequence: bool = False) -> Tensor:
        """Return the best exit of each token, [B, T], or if `per_sequence` of each text, [B].

        Exits are counted from 0.
        """
        # [B, T, exits]; tokens without a label count 0.
        gains = torch.stack([self._gain(trajectory, hidden) for hidden in trajectory.hidden], -1)
        gains = gains * trajectory.exit_loss.labelled.unsqueeze(-1)
        if per_sequence:
            gains = gains.sum(1)
        elif self.sigma:
            t = torch.arange(gains.shape[1], device=gains.device, dtype=gains.dtype)
            # kappa [T, T] adds the gains of neighbouring tokens.
            kappa = torch.exp(-((t[:, None] - t) ** 2) / self.sigma)
            gains = kappa @ gains
        # Every further exit must gain at least `penalty`.
        cost = self.penalty * torch.arange(gains.shape[-1], device=gains.device, dtype=gains.dtype)
        return (gains - cost).argmax(-1)

    def _gain(self, trajectory: ExitTrajectory, hidden: Tensor) -> Tensor:
        likelihood, choice = trajectory.exit_loss.tokens(hidden)
        if self.by == "likelihood":
            return likelihood
        return (choice == trajectory.exit_loss.labels).to(likelihood.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SoftmaxResponseConfig(ExitRuleConfig):
    """Softmax confidence: the gap between the probabilities of the two likeliest tokens.

    Costs the product with the vocabulary matrix at every exit.
    """

    kind: ClassVar[str] = "softmax"
    paper: ClassVar[str] = "Schuster et al. 2022 (CALM), section 3.5"

    def build(self, hidden_size: int, exits: int) -> "SoftmaxResponse":
        return SoftmaxResponse()


class SoftmaxResponse(ExitRule):
    """The confidence p_(1) - p_(2)."""

    def confidence(self, candidates: Candidates) -> Tensor:
        """Return the gap for the head's predictions from the hidden states."""
        if candidates.predict is None:
            raise InputError("depth.rule: 'softmax' needs the head of a language model; use another rule")
        return top_gap(candidates.predict(candidates.hidden)[0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateSaturationConfig(ExitRuleConfig):
    """State saturation: the cosine of a token's states after this layer and the one before."""

    kind: ClassVar[str] = "saturation"
    paper: ClassVar[str] = "Schuster et al. 2022 (CALM), section 3.5"

    def build(self, hidden_size: int, exits: int) -> "StateSaturation":
        return StateSaturation()


class StateSaturation(ExitRule):
    """The confidence cos(h_n, h_(n-1))."""

    def confidence(self, candidates: Candidates) -> Tensor:
        """Return the cosine, or 0 if it is negative."""
        # A layer that hardly turns the state has little left to add to the prediction.
        return F.cosine_similarity(candidates.state[0], candidates.previous[0], dim=-1).clamp_min(0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassifierConfig(ExitRuleConfig):
    """Learned exit classifier: a logistic unit at every exit gives the confidence.

    The unit of exit n is chi_n = logistic(w_n . h_n + b_n).

    `target`: the training target. "consistency": whether the prediction at the exit is equal to the final
    prediction, independently for each exit (CALM's). "exit": the exit of an `oracle`, with q(n) = chi_n
    prod_(m<n) (1 - chi_m), the geometric-like classifier of Elbayad et al. As in these papers, the loss of
    "consistency" trains only the units, and the loss of "exit" also the layers below.
    """

    target: Literal["consistency", "exit"] = "consistency"
    oracle: OracleConfig = OracleConfig()

    kind: ClassVar[str] = "classifier"
    paper: ClassVar[str] = "Elbayad et al. 2020, section 4.2; Schuster et al. 2022 (CALM), section 3.5"

    @classmethod
    def examples(cls) -> tuple["ClassifierConfig", ...]:
        return cls(), cls(target="exit")

    def build(self, hidden_size: int, exits: int) -> "Classifier":
        return Classifier(self, hidden_size, exits)


class Classifier(ExitRule):
    """The logistic units chi_n of all exits."""

    def __init__(self, config: ClassifierConfig, hidden_size: int, exits: int):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.randn(exits - 1, hidden_size) / math.sqrt(hidden_size))
        self.bias = nn.Parameter(torch.zeros(exits - 1))

    def logits(self, number: int, state: Tensor) -> Tensor:
        """Return the logits [...] of states [..., E] at exit `number`."""
        return state @ self.weight[number].to(state.dtype) + self.bias[number].to(state.dtype)

    def confidence(self, candidates: Candidates) -> Tensor:
        """Return chi_n."""
        return self.logits(candidates.number, candidates.state[0]).sigmoid()

    def loss(self, trajectory: ExitTrajectory) -> Tensor:
        """Return the binary cross-entropy at each exit, or the cross-entropy with the oracle's exits."""
        labelled = trajectory.exit_loss.labelled
        states = trajectory.states[:-1]
        if self.config.target == "consistency":  # CALM trains the units of a frozen model
            states = [state.detach() for state in states]
        logits = torch.stack([self.logits(n, state) for n, state in enumerate(states)], -1)
        if self.config.target == "exit":
            # log prod_(m <= n) (1 - chi_m): the token passes the exits up to n.
            stays = F.logsigmoid(-logits).cumsum(-1)
            before = F.pad(stays[..., :-1], (1, 0))
            # log q(n) = log chi_n + log prod_(m < n) (1 - chi_m). The end takes the remaining probability.
            log_q = torch.cat([F.logsigmoid(logits) + before, stays[..., -1:]], -1)
            best = self.config.oracle.exits(trajectory)
            terms = -log_q.gather(-1, best.unsqueeze(-1)).squeeze(-1)
        else:
            # [B, T, exits]; the prediction of the last exit is the model's own.
            choices = torch.stack(
                [trajectory.exit_loss.tokens(hidden)[1] for hidden in trajectory.hidden], -1
            )
            agree = (choices[..., :-1] == choices[..., -1:]).to(logits.dtype)
            terms = F.binary_cross_entropy_with_logits(logits, agree, reduction="none").mean(-1)
        return (terms * labelled).sum() / labelled.sum().clamp_min(1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShortlistConfig(ExitRuleConfig):
    """Shortlist confidence: the gap between the two likeliest tokens of a small vocabulary.

    `tokens`: the maximum size of the shortlist.
    """

    tokens: Annotated[int, Ge(2)] = 1024

    kind: ClassVar[str] = "shortlist"
    paper: ClassVar[str] = "Schuster et al. 2022 (CALM), section 3.5, over part of the vocabulary"

    def build(self, hidden_size: int, exits: int) -> "Shortlist":
        """Return the rule with zero rows, to be filled later."""
        return Shortlist(self, hidden_size)


class Shortlist(ExitRule):
    """The confidence p_(1) - p_(2) from `rows` [|V'|, E] and `bias` [|V'|], which are not trained."""

    rows: Tensor
    bias: Tensor

    def __init__(self, config: ShortlistConfig, hidden_size: int):
        super().__init__()
        self.register_buffer("rows", torch.zeros(config.tokens, hidden_size))
        self.register_buffer("bias", torch.zeros(config.tokens))

    def confidence(self, candidates: Candidates) -> Tensor:
        """Return the gap for the head's input."""
        hidden = candidates.hidden[0]
        logits = F.linear(hidden, self.rows.to(hidden.dtype), self.bias.to(hidden.dtype))
        # A softmax over |V'| tokens only, which overestimates probabilities.
        return top_gap(logits)


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
