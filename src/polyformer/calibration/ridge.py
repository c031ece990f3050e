"""Ridge regression in one pass over rows of any number: the normal equations are what is kept.

With X [N, E] and a column of ones, and Y [N, F],

    A, b = argmin sum |X A + b - Y|^2 + r s |A|^2,      s = mean of X^2, times N

so that r has no unit. The squared error of any A, b on rows follows from their normal equations too, which
is how r is chosen by rows that were not fitted to.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from polyformer.core.errors import InputError


class NormalEquations:
    """X^T X [E + 1, E + 1], X^T Y [E + 1, F] and sum Y^2, in float64, of the rows added so far."""

    def __init__(self, inputs: int, outputs: int):
        self.xx = torch.zeros(inputs + 1, inputs + 1, dtype=torch.float64)
        self.xy = torch.zeros(inputs + 1, outputs, dtype=torch.float64)
        self.yy, self.count = 0.0, 0

    def add(self, x: Tensor, y: Tensor) -> None:
        """Rows x [N, E] and y [N, F] more."""
        x = torch.cat([x, x.new_ones(len(x), 1)], 1).to(self.xx)
        y = y.to(self.xy)
        self.xx += x.T @ x
        self.xy += x.T @ y
        self.yy, self.count = self.yy + float(y.square().sum()), self.count + len(x)

    def solved(self, ridge: float) -> Tensor:
        """A above b, [E + 1, F]."""
        penalty = ridge * self.xx.diagonal()[:-1].mean()
        matrix = self.xx.clone()
        matrix.diagonal()[:-1].add_(penalty)
        return torch.linalg.lstsq(matrix, self.xy, driver="gelsd").solution  # also of too few rows

    def error(self, solution: Tensor) -> float:
        """sum |X A + b - Y|^2 of a solution [E + 1, F]."""
        squares = (solution * (self.xx @ solution - 2 * self.xy)).sum()
        return float(squares) + self.yy


def chosen(
    fitted: NormalEquations, held_out: NormalEquations, ridges: Sequence[float]
) -> tuple[float, Tensor]:
    """Of `ridges` the one whose solution for the first rows has the least error on the others, and that.

    Raises `InputError` where no row is held out.
    """
    if not held_out.count or not fitted.count:
        raise InputError("ridge: expected rows to fit to and rows held out")
    solutions = {ridge: fitted.solved(ridge) for ridge in ridges}
    best = min(ridges, key=lambda ridge: held_out.error(solutions[ridge]))
    return best, solutions[best]
