"""Oracles: the best exits in hindsight, which are the labels of exit classifiers.

With LL_t^n the log-likelihood of the label of token t at exit n, and C_t^n whether the prediction is right,

    n*_t = argmax_n sum_t' kappa(t, t') LL_t'^n - penalty n        kappa(t, t') = exp(-|t - t'|^2 / sigma)

("likelihood"), or with C instead of LL ("correctness"). `sigma` 0 uses only the token itself. For a whole
sequence the sum is over its tokens, with weight 1. Elbayad et al. 2020, sections 4.1 and 4.2.
"""

import dataclasses
from typing import Literal

import torch
from torch import Tensor

from polyformer.core.config import Config
from polyformer.core.ranges import NonNegativeFloat
from polyformer.nn.depth.exits.base import ExitTrajectory


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
