"""Whether counts are what a probability says: exact tests, which a right program fails once in a million."""

from collections.abc import Sequence

from scipy import stats

RARE = 1e-6


def is_share(count: int, draws: int, probability: float) -> bool:
    """Whether `count` of `draws` is what independent draws of this probability give (exact binomial test)."""
    return stats.binomtest(int(count), int(draws), probability).pvalue > RARE


def are_shares(counts: Sequence[int], probabilities: Sequence[float]) -> bool:
    """The same for several outcomes (chi-square test); the probabilities need not sum to 1."""
    draws, whole = sum(counts), sum(probabilities)
    return stats.chisquare(counts, [draws * p / whole for p in probabilities]).pvalue > RARE
