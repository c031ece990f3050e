"""The errors of approximations of attention: projected keys and values, and random features.

Attention P = softmax(A), A = Q K^T / sqrt(d), times a column w of the values, for random Q, K and V, and

    low_rank    P R^T R w               R [k, n], entries of variance 1 / k      theorem 1
    svd         P_k w                   the k greatest singular values of P      equation 6
    proof       softmax(A E^T) F w      E = d R, F = exp(-d) R, a small d        theorem 2, equation 7
    fitted      softmax(A E^T) F w      E and F fitted by Adam

Wang et al. 2020, theorems 1 and 2. Random features: Choromanski et al. 2021, figure 4; Peng et al. 2021.
"""

import dataclasses
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Self

import torch
from torch import Tensor

from polyformer.attention.mechanisms.base import Heads
from polyformer.attention.mechanisms.linear.feature_attention import linear_attention
from polyformer.attention.mechanisms.linear.feature_maps import MAPS, Kernel
from polyformer.attention.mechanisms.random_directions import directions
from polyformer.core.sequence.context import Context
from polyformer_lab.cells import Cell, Row, measurement

QUANTILE = 0.95
"""The quantile of the errors of many draws, for a bound that holds "with high probability"."""

LEARNING_RATE = 0.005
SMALL = 1e-3
"""d in the matrices of theorem 2's proof."""

Errors = tuple[float, float]
"""Errors relative to |P w| and to |P| |w|."""


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """Scores A [n, n] and values V [n, d], float64."""

    scores: Tensor
    values: Tensor

    @classmethod
    def draw(cls, n: int, width: int, common: float, seed: int) -> Self:
        """Return a problem with normal queries, keys and values; all tokens' values share `common`."""
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(n, width, dtype=torch.float64, generator=generator) for _ in range(3))
        return cls(q @ k.T / math.sqrt(width), v + common)

    @property
    def weights(self) -> Tensor:
        """Return softmax(scores)."""
        return torch.softmax(self.scores, -1)

    def errors(self, approximation: Tensor) -> Errors:
        """Return the errors of the outputs [n, d]: the quantile over the columns of V."""
        exact = self.weights @ self.values
        off = (approximation - exact).norm(dim=0)
        factors = self.weights.norm() * self.values.norm(dim=0)
        return _quantile(off / exact.norm(dim=0)), _quantile(off / factors)


@measurement("approximation", "norm", "size")
def projection_errors(
    cell: Cell,
    vary: str,
    sizes: Sequence[int],
    n: int,
    k: int,
    width: int,
    common: float,
    draws: int,
    fit_steps: int,
) -> Iterator[Row]:
    """Yield the errors relative to |P w| ("output") and |P| |w| ("factors"), with theorem 1's bound.

    Args:
        cell: its seed is the seed of the problem, the next seed is for the matrices.
        vary: "k" or "n"; matrices of theorem 2 are tried only for "k".
        sizes: the values of k or n.
        n: tokens, if k varies.
        k: rows of the matrices, if n varies.
        width: the head dimension.
        common: the part of every value that all tokens share, as a multiple of the part that differs.
        draws: draws of R.
        fit_steps: steps to fit E and F.
    """
    for size in sizes:
        tokens, rows = (size, k) if vary == "n" else (n, size)
        problem = Problem.draw(tokens, width, common, cell.seed or 0)
        generator = torch.Generator().manual_seed((cell.seed or 0) + 1)
        matrices = [random_matrix(rows, tokens, generator) for _ in range(draws)]
        results = {"low_rank": low_rank(problem, matrices), "svd": svd(problem, rows)}
        if vary == "k":
            results["proof"] = of_the_proof(problem, matrices)
            results["fitted"] = problem.errors(fitted(problem, rows, fit_steps, generator))
        for approximation, errors in results.items():
            for norm, error in zip(("output", "factors"), errors):
                label = {"approximation": approximation, "norm": norm, "size": size}
                yield {**label, "error": error, "bound": bound(tokens, rows)}


def bound(n: int, k: int) -> float:
    """Return epsilon of theorem 1 for k = 5 log n / epsilon^2."""
    return math.sqrt(5 * math.log(n) / k)


def random_matrix(k: int, n: int, generator: torch.Generator) -> Tensor:
    """Return R [k, n] with entries of variance 1 / k."""
    return torch.randn(k, n, dtype=torch.float64, generator=generator) / math.sqrt(k)


def low_rank(problem: Problem, matrices: Sequence[Tensor]) -> Errors:
    """Return the quantiles over the matrices R."""
    return _quantiles([problem.errors(problem.weights @ (r.T @ (r @ problem.values))) for r in matrices])


def svd(problem: Problem, k: int) -> Errors:
    """Return the errors with the k greatest singular values."""
    u, s, vh = torch.linalg.svd(problem.weights)
    return problem.errors(u[:, :k] * s[:k] @ (vh[:k] @ problem.values))


def of_the_proof(problem: Problem, matrices: Sequence[Tensor]) -> Errors:
    """Return the quantiles over the matrices R with E and F of theorem 2's proof."""
    total = torch.exp(problem.scores).sum(-1, keepdim=True)
    small = math.exp(-SMALL)
    outputs = (
        torch.exp(SMALL * (problem.scores @ r.T)) @ (small * (r @ problem.values)) / total for r in matrices
    )
    return _quantiles([problem.errors(output) for output in outputs])


def fitted(problem: Problem, k: int, steps: int, generator: torch.Generator) -> Tensor:
    """Return softmax(A E^T) F V with E and F [k, n] fitted by Adam to P V."""
    scores, values = problem.scores.float(), problem.values.float()
    exact, n = torch.softmax(scores, -1) @ values, len(scores)
    e, f = ((random_matrix(k, n, generator) * math.sqrt(k / n)).float().requires_grad_() for _ in range(2))
    optimizer = torch.optim.Adam([e, f], lr=LEARNING_RATE)
    for _ in range(steps):
        optimizer.zero_grad()
        output = torch.softmax(scores @ e.T, -1) @ (f @ values)
        (output - exact).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        return (torch.softmax(scores @ e.T, -1) @ (f @ values)).double()


def _quantiles(errors: Sequence[Errors]) -> Errors:
    output, factors = zip(*errors)
    return _quantile(torch.tensor(output)), _quantile(torch.tensor(factors))


def _quantile(values: Tensor) -> float:
    return float(torch.quantile(values, QUANTILE))


FLOOR = 0.01
"""The lower bound of the denominators estimated by trigonometric features, as a share of the weights' sum."""


@measurement("features")
def feature_errors(
    cell: Cell,
    map: str,
    orthogonal: bool,
    features: Sequence[int],
    length: int,
    width: int,
    draws: int,
    size: float,
) -> Iterator[Row]:
    """Yield the mean square error of the attention of random inputs by the number of features.

    The last row has the geometric mean over the numbers of features.

    Args:
        cell: its seed is the seed of inputs and directions, which are the same for all maps.
        map: the feature map; "gaussian" estimates attention of unit queries and keys.
        orthogonal: whether the directions are orthogonal.
        features: the numbers of directions.
        length: tokens.
        width: the head dimension.
        draws: the number of draws over which the error is averaged.
        size: standard deviation of the entries of queries and keys.
    """
    errors = {}
    for count in features:
        seeds = [(cell.seed or 0) + 1000 * draw for draw in range(draws)]
        own = [_error(map, orthogonal, count, length, width, size, seed) for seed in seeds]
        errors[count] = statistics.fmean(own)
        yield {"features": count, "error": errors[count]}
    yield {"mean_error": statistics.geometric_mean(errors.values())}


def _error(map: str, orthogonal: bool, count: int, length: int, width: int, size: float, seed: int) -> float:
    generator = torch.Generator().manual_seed(seed)
    shape = 1, 1, length, width
    q, k, v = (torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(3))
    if map == "gaussian":
        q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    else:
        q, k = (x * size * width**-0.25 for x in (q, k))
    kernel = Kernel(MAPS[map], directions(count, width, orthogonal, generator), FLOOR)
    estimate, _ = linear_attention(Heads(q, k, v), kernel, Context(length, length))
    return float((estimate - torch.softmax(q @ k.mT, -1) @ v).square().mean())
