"""Learn then Test: the lowest threshold for which the risk is shown to be small enough.

The losses L_1 .. L_n of n texts at threshold lambda are in [0, 1], with mean L and expectation R(lambda). If
R > delta, a mean as low as the measured mean has at most the probability (Hoeffding, Bentkus)

    p = min(exp(-n h(min(L, delta), delta)), e P(Binomial(n, delta) <= ceil(n L)))
    h(a, b) = a log(a / b) + (1 - a) log((1 - a) / (1 - b))

Thresholds are tested from the most conservative down, each at level epsilon = 1 - confidence, until the first
failure (fixed sequence testing). The probability that any threshold that passed has R > delta is at most
epsilon, for any model, distribution of texts and number of thresholds. Angelopoulos et al. 2021 (Learn then
Test), section 2 and appendix; Schuster et al. 2022 (CALM), section 4.2, algorithm 1.
"""

import math
from collections.abc import Iterable, Sequence

from scipy.stats import binom


def hoeffding_bentkus(losses: Sequence[float], delta: float) -> float:
    """Return the p-value of "the expected loss is more than `delta`", for losses in [0, 1]."""
    count = len(losses)
    mean = min(math.fsum(losses) / count, delta)
    exponent = -count * _relative_entropy(mean, delta)
    return min(1.0, math.exp(exponent), bentkus(losses, delta))


def bentkus(losses: Sequence[float], delta: float) -> float:
    """Return e P(Binomial(n, delta) <= ceil(sum of the losses))."""
    total = math.ceil(round(math.fsum(losses), 9))  # removes rounding errors before ceil
    return min(1.0, math.e * float(binom.cdf(total, len(losses), delta)))


def _relative_entropy(a: float, b: float) -> float:
    """Return h(a, b), the relative entropy of two Bernoulli variables."""
    first = 0.0 if a == 0 else a * math.log(a / b)
    second = 0.0 if a == 1 else (1 - a) * math.log((1 - a) / (1 - b))
    return first + second


def lowest_valid(
    measured: Iterable[tuple[float, Sequence[float]]], risk: float, confidence: float
) -> float | None:
    """Return the last threshold before the first failure; None if the first threshold fails.

    measured: decreasing thresholds, each with its losses; read until the first failure.
    """
    best = None
    for threshold, losses in measured:
        if hoeffding_bentkus(losses, risk) > 1 - confidence:
            return best
        best = threshold
    return best
