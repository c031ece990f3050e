"""A text as windows of tokens that a model reads, each token but the first the target of exactly one.

    window n reads the tokens [n f - context, n f + f) and predicts [n f + 1, n f + f + 1)
    f = length - context

So entry number i of a text is its token i as context with token i + 1 as value, whoever reads it and however
often he is interrupted.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from polyformer.core.config import Config
from polyformer.core.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading(Config):
    """`isolated`: documents do not see one another, as our language models are trained."""

    length: int = 512  # tokens that are read at once
    context: int = 0  # of those, how many the window before had
    isolated: bool = False

    def __post_init__(self) -> None:
        if self.length < 1:
            raise InputError(f"length: expected 1 token or more, got {self.length}")
        if not 0 <= self.context < self.length:
            raise InputError(
                f"context: expected 0 to {self.length - 1} tokens of a length of {self.length}, "
                f"got {self.context}"
            )

    @property
    def fresh(self) -> int:
        """How many targets a window has."""
        return self.length - self.context


@dataclasses.dataclass(frozen=True, eq=False)
class Window:
    """ids: [T + 1], those that are read and one target more. documents: [T + 1], which one each is of.
    carried: how many are there as context alone."""

    number: int
    ids: np.ndarray
    documents: np.ndarray
    carried: int

    @property
    def entries(self) -> int:
        """How many targets it has."""
        return len(self.ids) - 1 - self.carried


def windows(documents: Iterable[Sequence[int]], reading: Reading) -> Iterator[Window]:
    """All windows of a text, in order, read lazily; the last may be shorter."""
    ids, owners = np.empty(0, np.int32), np.empty(0, np.int32)
    carried = number = 0
    for index, document in enumerate(documents):
        ids = np.concatenate([ids, np.asarray(document, np.int32)])
        owners = np.concatenate([owners, np.full(len(document), index, np.int32)])
        while len(ids) > (end := carried + reading.fresh):
            yield Window(number, ids[: end + 1], owners[: end + 1], carried)
            carried, number = min(reading.context, end), number + 1
            ids, owners = ids[end - carried :], owners[end - carried :]
    if len(ids) > carried + 1:
        yield Window(number, ids, owners, carried)
