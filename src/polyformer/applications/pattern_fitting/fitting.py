"""The pattern of a whole model, chosen from the errors of its heads."""

import dataclasses

from torch import Tensor

from polyformer.applications.pattern_fitting.choosing import choose, limit_options
from polyformer.applications.pattern_fitting.errors import HeadErrors
from polyformer.attention.patterns import Pattern, PerHead, PerLayer
from polyformer.core.errors import InputError


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
