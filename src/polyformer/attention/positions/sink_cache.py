"""Positions inside a cache that keeps the first and the latest tokens of a text (Xiao et al. 2024).

A query is the last entry of the cache when it is computed, so with C = first + length entries

    distance(i, j) = min(i, C - 1) - j      of a query i and a token j < first that is not among the latest
    distance(i, j) = i - j                  of the `length` latest tokens up to the query

Both sets of pairs are computed as parts of a call and joined by log-sum-exp.
"""

from typing import NamedTuple

from polyformer.attention.patterns import Global, Pattern, Window, Without


class SinkCache(NamedTuple):
    """A cache of the first `first` tokens of a text and its latest `length` tokens."""

    first: int
    length: int

    @property
    def size(self) -> int:
        """Return the number C of its entries."""
        return self.first + self.length

    @property
    def latest(self) -> Pattern:
        """Return the pairs of queries with the latest tokens."""
        return Window(self.length - 1, 0)

    @property
    def pattern(self) -> Pattern:
        """Return all pairs."""
        return self.latest | Global(self.first)

    @property
    def distant(self) -> Pattern:
        """Return the pairs of queries with first tokens that are not among the latest."""
        return Without(Global(self.first), self.latest)
