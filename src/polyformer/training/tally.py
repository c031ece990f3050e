"""The numbers of training steps that have not yet left the device: a device is asked for them once a row."""

import torch

from polyformer.training.engine import Engine
from polyformer.training.feed import Group


class Tally:
    """Sums over the steps of this process since they were last asked for; `norm` is the last gradient's."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens = 0  # read since the last row of metrics
        self.weight = 0  # labelled tokens
        self.loss = self._number(0.0)  # times labelled tokens
        self.norm = self._number(0.0)
        self.bad = self._number(float("inf"))  # first step whose loss or gradient is not finite

    def _number(self, value: float) -> torch.Tensor:
        return torch.tensor(value, dtype=torch.float64, device=self.engine.device)

    def add(self, step: int, group: Group, loss: torch.Tensor, norm: torch.Tensor) -> None:
        """A step on `group`: the sum of its loss over labelled tokens, and the norm of its gradient."""
        self.loss += loss
        self.weight += sum(group.weights)
        self.tokens += group.tokens
        self.norm = norm
        # Loss scaling of fp16 skips updates whose gradient overflows: only the loss tells.
        telltale = self.loss if self.engine.scaler.is_enabled() else self.loss + norm
        self.bad = torch.where(telltale.isfinite(), self.bad, self.bad.clamp(max=step))

    def mean(self) -> float:
        """The mean loss of this process."""
        return float(self.loss) / max(self.weight, 1)

    def collect(self) -> tuple[float, float, float, float]:
        """The loss, the labelled tokens and the tokens of all processes, and the first step that was not
        finite; the sums begin again, but for tokens. All processes call it."""
        mine = torch.stack([self.loss, self._number(self.weight), self._number(self.tokens), self.bad])
        losses, weights, tokens, bad = zip(*self.engine.rows(mine))
        self.loss.zero_()
        self.weight = 0
        return sum(losses), sum(weights), sum(tokens), min(bad)
