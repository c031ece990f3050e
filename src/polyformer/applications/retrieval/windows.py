"""Windows of tokens for the model: each token of a text except the first is the target of exactly one window.

    window n reads the tokens [n f - context, n f + f) and predicts [n f + 1, n f + f + 1)
    f = length - context

So entry i of a text has token i as context and token i + 1 as value, regardless of the process that reads it
and of interruptions.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.ranges import PositiveInt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading(Config):
    """Options of the windows. isolated: documents cannot attend to each other, as our models are trained."""

    length: PositiveInt = 512  # tokens per window
    context: int = 0  # tokens that the previous window contains too
    isolated: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.context < self.length:
            raise InputError(
                f"context: expected 0 to {self.length - 1} tokens of a length of {self.length}, "
                f"got {self.context}"
            )

    @property
    def fresh(self) -> int:
        """Return the number of targets per window."""
        return self.length - self.context


@dataclasses.dataclass(frozen=True, eq=False)
class Window:
    """A window of tokens."""

    number: int
    ids: np.ndarray  # [T + 1], the input tokens and one more target
    documents: np.ndarray  # [T + 1], the document of each token
    carried: int  # the number of tokens that serve only as context

    @property
    def entries(self) -> int:
        """Return the number of targets."""
        return len(self.ids) - 1 - self.carried


def windows(documents: Iterable[Sequence[int]], reading: Reading) -> Iterator[Window]:
    """Yield all windows of a text in order, lazily; the last may be shorter."""
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
