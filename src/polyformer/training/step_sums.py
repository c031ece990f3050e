"""Sums over training steps that stay on the device, which is read only once per row of metrics."""

import torch

from polyformer.training.engine import Engine
from polyformer.training.feed import StepBatches


class StepSums:
    """The sums over the steps of this process since the last `collect`; `norm` is the last gradient norm."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens = 0  # read since the last row of metrics
        self.weight = 0  # labelled tokens
        self.loss = self._number(0.0)  # times labelled tokens
        self.norm = self._number(0.0)
        self.bad = self._number(float("inf"))  # first step with a loss or gradient that is not finite

    def _number(self, value: float) -> torch.Tensor:
        return torch.tensor(value, dtype=torch.float64, device=self.engine.device)

    def add(self, step: int, group: StepBatches, loss: torch.Tensor, norm: torch.Tensor) -> None:
        """Add a step on `group`: the sum of its loss over labelled tokens, and the norm of its gradient."""
        self.loss += loss
        self.weight += sum(group.weights)
        self.tokens += group.tokens
        self.norm = norm
        # Loss scaling of fp16 skips updates after a gradient overflow, so only the loss is checked.
        telltale = self.loss if self.engine.scaler.is_enabled() else self.loss + norm
        self.bad = torch.where(telltale.isfinite(), self.bad, self.bad.clamp(max=step))

    def mean(self) -> float:
        """Return the mean loss of this process."""
        return float(self.loss) / max(self.weight, 1)

    def collect(self) -> tuple[float, float, float, float]:
        """Return loss, labelled tokens and tokens of all processes, and the first step that was not finite.

        Resets the sums except the tokens. Collective: all processes call it.
        """
        mine = torch.stack([self.loss, self._number(self.weight), self._number(self.tokens), self.bad])
        losses, weights, tokens, bad = zip(*self.engine.rows(mine))
        self.loss.zero_()
        self.weight = 0
        return sum(losses), sum(weights), sum(tokens), min(bad)
