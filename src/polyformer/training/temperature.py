"""Temperature scaling: calibrated probabilities of labels. Guo et al. 2017, section 4.2.

    p = softmax(z / T)        T minimizes the negative log-likelihood (NLL) on validation rows

The order of the labels does not change for any T > 0. The mean NLL is convex in b = 1 / T, with the
derivative

    mean over rows of sum_k p_k (z_k - z_y)

which increases with b. Its root is found by bisection. There is no finite T > 0 if the derivative is negative
for all b (every row is predicted correctly) or positive for all b (equal probabilities would be better).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BINS = 15
"""Bins of the expected calibration error, as in the paper."""

HALVINGS = 60
LOWEST, HIGHEST = 1e-3, 1e3
"""The range of b."""


@dataclass(frozen=True)
class Reliability:
    """The calibration of probabilities on some rows.

    nll: mean negative log-likelihood, in nats. error: the expected calibration error, 0 to 1. bins: mean
    probability of the predicted label, accuracy and number of rows of each bin with rows.
    """

    nll: float
    error: float
    bins: Sequence[tuple[float, float, int]]

    @classmethod
    def of(cls, logits: Tensor, labels: Tensor) -> "Reliability":
        """Return the calibration of softmax(logits) for logits [rows, labels] and right labels [rows].

            ECE = sum over bins of (rows of the bin / rows) |accuracy - mean probability|

        Guo et al. 2017, equation 3; a row is in the bin of the probability of its predicted label.
        """
        log_p = logits.double().log_softmax(-1)
        sure, predicted = log_p.exp().max(-1)
        right = (predicted == labels).double()
        places = (sure * BINS).ceil().long().clamp(1, BINS) - 1  # a bin includes its upper edge
        rows = torch.bincount(places, minlength=BINS).double()
        sums = [torch.zeros(BINS).double().index_add(0, places, x) for x in (sure, right)]
        error = float((sums[1] - sums[0]).abs().sum() / len(labels))
        bins = [(float(p / n), float(hits / n), int(n)) for p, hits, n in zip(*sums, rows.tolist()) if n]
        nll = float(-log_p.gather(-1, labels[:, None]).mean())
        return cls(nll, error, bins)


@dataclass(frozen=True)
class Calibration:
    """The temperature of a model (1: unchanged), and its calibration on validation data before and after."""

    temperature: float
    before: Reliability
    after: Reliability

    @property
    def changes(self) -> bool:
        """Return whether the temperature changes the probabilities."""
        return self.temperature != 1

    def note(self) -> str:
        """Return the result in a line."""
        number = sum(count for _, _, count in self.before.bins)
        rows = f"{number:,} validation row{'' if number == 1 else 's'}"
        before = f"NLL {self.before.nll:.4g}, expected calibration error {self.before.error:.4g}"
        if not self.changes:
            return f"temperature 1, no other lowers the NLL of {rows}: {before}"
        after = f"NLL {self.after.nll:.4g}, expected calibration error {self.after.error:.4g}"
        return f"temperature {self.temperature:.4g} on {rows}: {before} before; {after} after"

    def record(self) -> dict[str, Any]:
        """Return plain data for run.json."""
        sides = {
            name: {"nll": side.nll, "calibration_error": side.error, "bins": [list(row) for row in side.bins]}
            for name, side in (("before", self.before), ("after", self.after))
        }
        return {"temperature": self.temperature, **sides}


def calibrated(logits: Tensor, labels: Tensor) -> Calibration:
    """Return the calibration for logits [rows, labels] and right labels [rows].

    The temperature is 1 if there is no finite temperature, or none that lowers the NLL.
    """
    before = Reliability.of(logits, labels)
    temperature = fitted_temperature(logits, labels)
    if temperature is None:
        return Calibration(1.0, before, before)
    after = Reliability.of(logits.double() / temperature, labels)
    if not after.nll < before.nll:
        return Calibration(1.0, before, before)
    return Calibration(temperature, before, after)


def fitted_temperature(logits: Tensor, labels: Tensor) -> float | None:
    """Return the temperature that minimizes the NLL; None if there is no minimum within the range."""
    z = logits.double()
    difference = z - z.gather(-1, labels[:, None])  # no rounding changes the sign of a row's derivative

    def slope(b: float) -> float:
        return float(((z * b).softmax(-1) * difference).sum(-1).mean())

    low, high = LOWEST, HIGHEST
    if not slope(low) < 0 < slope(high):
        return None
    for _ in range(HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    return 1 / (low * high) ** 0.5
