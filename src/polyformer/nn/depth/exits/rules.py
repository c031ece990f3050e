"""Rules that use a token's state at the exit: its prediction, its saturation, or a learned unit."""

import dataclasses
import math
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.core.errors import InputError
from polyformer.nn.depth.exits.base import Candidates, ExitRule, ExitRuleConfig, ExitTrajectory, top_gap
from polyformer.nn.depth.exits.oracles import OracleConfig


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
