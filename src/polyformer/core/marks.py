"""What parts of a model say of single tokens to those who look inside: buckets, clusters, experts, spans.

    mark("bucket, round 1", lambda: buckets[:, :, 0])

says so of all tokens of a call. Where nobody looks nothing is computed, and a traced graph says nothing.
"""

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Literal

from torch import Tensor

from polyformer.core.tap import Tap

Of = Literal["tokens", "queries", "keys"]


@dataclasses.dataclass(frozen=True, eq=False)
class Mark:
    """A number for each token of a call.

    values: [B, H or 1, T]. Integers are labels, of which -1 is none, and floating numbers amounts. of:
    whether the T are queries, keys or, where these are the same tokens, both. names: of the labels 0, 1, ...,
    where they have any.
    """

    name: str
    values: Tensor
    of: Of = "tokens"
    names: tuple[str, ...] = ()


_tap: Tap[Mark] = Tap("marks")


def marked() -> AbstractContextManager[list[Mark]]:
    """Collects every mark inside, in order."""
    return _tap.collected()


def mark(name: str, values: Callable[[], Tensor], of: Of = "tokens", names: tuple[str, ...] = ()) -> None:
    """Says it to whoever collects; `values` is called only for them."""
    if _tap.records is not None:
        _tap.show(Mark(name, values().detach(), of, names))
