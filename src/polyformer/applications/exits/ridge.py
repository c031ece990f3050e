"""Ridge regression in one pass over any number of rows, by accumulated normal equations.

With rows x_t of X [N, E] and y_t of Y [N, F], of weights w_t,

    A, b = argmin sum_t w_t |x_t A + b - y_t|^2 + r s |A|^2,      s = sum_t w_t |x_t|^2 / E

so that r has no unit.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class NormalEquations:
    """The normal equations of the rows added so far, in float64.

    X^T W X [E + 1, E + 1], with a column of ones in X, and X^T W Y [E + 1, F].
    """

    def __init__(self, inputs: int, outputs: int):
        self.xx = torch.zeros(inputs + 1, inputs + 1, dtype=torch.float64)
        self.xy = torch.zeros(inputs + 1, outputs, dtype=torch.float64)

    @property
    def weight(self) -> float:
        """Return the sum of the weights."""
        return float(self.xx[-1, -1])

    def add(self, x: Tensor, y: Tensor, weights: Tensor) -> None:
        """Add rows x [N, E] and y [N, F] with weights [N]."""
        x = torch.cat([x, x.new_ones(len(x), 1)], 1).to(self.xx)
        y, weights = y.to(self.xy), weights.to(self.xx)
        weighted = x * weights.unsqueeze(1)
        self.xx += weighted.T @ x
        self.xy += weighted.T @ y

    def solved(self, ridges: Sequence[float]) -> list[Tensor]:
        """Return A above b for each of the ridges, [E + 1, F].

        With the means subtracted from X and Y, A = (X^T W X + r s I)^+ X^T W Y; all ridges share an
        eigendecomposition.
        """
        x, y = self.xx[:-1, -1:] / self.weight, self.xy[-1:] / self.weight  # the means [E, 1] and [1, F]
        values, vectors = torch.linalg.eigh(self.xx[:-1, :-1] - self.weight * x @ x.T)
        turned = vectors.T @ (self.xy[:-1] - self.weight * x @ y)
        least = values[-1] * len(values) * torch.finfo(values.dtype).eps  # zero up to rounding
        solutions = []
        for ridge in ridges:
            size = values.clamp_min(0) + ridge * self.xx.diagonal()[:-1].mean()
            a = vectors @ torch.where(size > least, turned.T / size, 0).T
            solutions.append(torch.cat([a, y - x.T @ a]))
        return solutions
