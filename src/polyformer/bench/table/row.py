"""A row of the table: what is measured, who takes part, what is asked."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping

OURS = "polyformer"

Make = Callable[[], Callable[[], object]]
"""Prepares a contender and returns the call that is measured. Where it cannot take part it raises
`AbsentError`, or `ImportError` for a package that is not installed."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Contenders that run in turn. Where `flop` are said, floating-point operations of the products that a
    call cannot do without, they are compared with the speed of products on the machine."""

    contenders: Mapping[str, Make]
    name: str = ""
    flop: float | None = None
    tokens: int | None = None  # that a call reads or writes


@dataclasses.dataclass(frozen=True)
class Asked:
    """How many times as fast as `peer` ours should be; `narrow`: where vectors have less than 512 bits, if
    that differs. A `ratio` of None asks nothing: the comparison is shown."""

    peer: str
    ratio: float | None = None
    narrow: float | None = None
    ours: str = OURS


@dataclasses.dataclass(frozen=True)
class Row:
    """What `cases` makes for a real run, or with True for one that takes seconds: sizes alone differ.

    Of several cases the one with the worst ratio counts. `share`: how much of the machine's product speed
    is asked, 0 to 1; `narrow_share` as in `Asked`.
    """

    name: str
    what: str
    cases: Callable[[bool], Iterable[Case]]
    asked: tuple[Asked, ...]
    share: float | None = None
    narrow_share: float | None = None
    repeats: int = 5
