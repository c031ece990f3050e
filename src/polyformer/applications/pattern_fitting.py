"""A pattern for each head of a trained model, under a budget of query-key pairs, without training.

    patterns = candidates(length)
    errors = head_errors(model, rows, patterns)
    fitted = fit_pattern(errors, budget=0.25)
    small, _ = convert(model, fitted.pattern)

Each head gets an option so that the total error is least under the budget: a multiple-choice knapsack.

    min sum_n error[n, c_n]   so that   sum_n cost[c_n] <= budget

By dynamic programming over the budget, divided into equal units: best[b] after item n is the least error of
the first n items at a cost of at most b units.

Heads of a layer with different patterns are separate calls. `limit_options` leaves each layer a few options,
those with the least Lagrangian error + price * cost at the price where the budget suffices.
"""

import dataclasses
import itertools

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from polyformer.applications.head_errors import HeadErrors, candidates, head_errors, pair_counts
from polyformer.attention.patterns import Pattern, PerHead, PerLayer
from polyformer.core.errors import InputError

__all__ = [
    "FittedPattern",
    "HeadErrors",
    "candidates",
    "check_budget",
    "choose",
    "fit_pattern",
    "head_errors",
    "pair_counts",
]

UNITS = 1 << 15
"""Parts of the budget. A cost is rounded up to whole units, so that no choice exceeds the budget."""


def choose(errors: NDArray[np.float64], costs: NDArray[np.int64], budget: int) -> list[int]:
    """Return the option of each item, from errors [N, C] and costs [C]; of equal errors the first option.

    Raises `InputError` if the cheapest options exceed the budget.
    """
    units = min(UNITS, budget)
    needed = [-(-int(cost) * units // budget) if budget else units + 1 for cost in costs]
    best, picks = np.zeros(units + 1), list[NDArray[np.int16]]()
    for row in errors:
        least, pick = np.full(units + 1, np.inf), np.zeros(units + 1, dtype=np.int16)
        for option, (error, need) in enumerate(zip(row, needed)):
            if need > units:
                continue
            total = best[: units + 1 - need] + error
            better = total < least[need:]
            least[need:][better] = total[better]
            pick[need:][better] = option
        best = least
        picks.append(pick)
    if not np.isfinite(best[units]):
        raise InputError(
            f"budget: expected at least {len(errors) * int(costs.min()):,} pairs, the cost of the cheapest "
            f"patterns, got {budget:,}; raise the budget or add cheaper patterns"
        )
    left, chosen = units, list[int]()
    for pick in reversed(picks):
        chosen.append(int(pick[left]))
        left -= needed[chosen[-1]]
    return chosen[::-1]


STEPS = 40
"""Bisections of the price of a pair."""


def limit_options(
    errors: NDArray[np.float64], costs: NDArray[np.int64], budget: int, most: int
) -> NDArray[np.float64]:
    """Return errors [L, H, C], infinite for all but `most` options of each layer, which fit the budget."""
    subsets = np.array(list(itertools.combinations(range(len(costs)), min(most, len(costs)))))

    def best(price: float) -> tuple[NDArray[np.int64], int]:
        """Return the subset of each layer with the least Lagrangian, and the cost of its best options."""
        priced = errors + price * costs
        chosen = np.stack([subsets[layer[:, subsets].min(-1).sum(0).argmin()] for layer in priced])
        options = [subset[layer[:, subset].argmin(-1)] for layer, subset in zip(priced, chosen)]
        return chosen, int(costs[np.stack(options)].sum())

    low, high = 0.0, float(errors.max() + 1)  # a pair is an integer, so this price exceeds every error
    for _ in range(STEPS):
        # Errors and prices of pairs differ by many powers of 10.
        middle = (low * high) ** 0.5 if low else high * 1e-12
        low, high = (low, middle) if best(middle)[1] <= budget else (middle, high)
    limited = np.full_like(errors, np.inf)
    for layer, subset in enumerate(best(high)[0]):
        limited[layer][:, subset] = errors[layer][:, subset]
    return limited


@dataclasses.dataclass(frozen=True, eq=False)
class FittedPattern:
    """The chosen patterns. chosen: [L, H], indices into the patterns of `errors`."""

    errors: HeadErrors
    chosen: Tensor

    @property
    def pattern(self) -> Pattern:
        """The pattern of the model: `PerLayer([PerHead([...]), ...])`, or shorter if heads agree."""
        layers = [_shortest(PerHead, self._of_layer(row)) for row in self.chosen.tolist()]
        return _shortest(PerLayer, layers)

    @property
    def shares(self) -> Tensor:
        """The share of all query-key pairs that each head computes, [L, H]."""
        costs = self.errors.costs.double()
        return costs[self.chosen] / costs.max()

    @property
    def share(self) -> float:
        """The share of all query-key pairs that the model computes."""
        return float(self.shares.mean())

    def _of_layer(self, row: list[int]) -> list[Pattern]:
        return [self.errors.patterns[index] for index in row]


def check_budget(budget: float) -> None:
    """Raise `InputError` unless the budget is a share of all pairs."""
    if not 0 < budget <= 1:
        raise InputError(f"budget: expected a share of all pairs above 0 and up to 1, got {budget}")


def fit_pattern(errors: HeadErrors, budget: float, most: int = 2) -> FittedPattern:
    """Return the patterns with the least sum of errors that compute at most `budget` of all pairs.

    budget: from 0 to 1, a share of the pairs of the most expensive pattern in all heads. most: different
    patterns in a layer, 1 to 4, because each is a separate call. Raises `InputError` for a budget below the
    cheapest patterns.
    """
    check_budget(budget)
    layers, heads, _ = errors.errors.shape
    pairs = int(budget * layers * heads * int(errors.costs.max()))
    # The cheapest of equally good patterns comes first.
    order = errors.costs.argsort(stable=True)
    costs = errors.costs[order].numpy()
    limited = limit_options(errors.errors[..., order].numpy(), costs, pairs, most)
    chosen = choose(limited.reshape(layers * heads, -1), costs, pairs)
    return FittedPattern(errors, order[chosen].view(layers, heads))


def _shortest(kind: type[PerHead] | type[PerLayer], patterns: list[Pattern]) -> Pattern:
    """Return the patterns of heads or layers, or the single pattern that all of them have."""
    return patterns[0] if len(set(patterns)) == 1 else kind(tuple(patterns))
