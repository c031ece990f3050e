"""Ranges of numbers in the types of dataclasses: `width: PositiveInt = 64`, `base: Annotated[float, Gt(1)]`.

The metadata of such a type are constraints of annotated-types (`Ge`, `Gt`, `Le`, `Lt`, `Interval`) and
perhaps a `Wording`. A field has at most one range, which holds for every number in it, as in
`tuple[PositiveInt, ...] | None`. Infinity and NaN are in no range.
"""

import dataclasses
import functools
import math
import numbers
import typing
from collections import ChainMap
from collections.abc import Callable, Iterator
from typing import Annotated, Any

from annotated_types import Ge, Gt, Interval, Le, Lt

from polyformer.core.errors import InputError, quote
from polyformer.core.limits import SIZE

SEEDS = ("seed", "hash_seed")  # integers that are not sizes


@dataclasses.dataclass(frozen=True)
class Wording:
    """Words for the error of a range: "expected `noun` in [0, 1), got 2; `fix`"."""

    noun: str = "a number"
    fix: str = ""


PositiveInt = Annotated[int, Ge(1)]
NonNegativeInt = Annotated[int, Ge(0)]
PositiveFloat = Annotated[float, Gt(0)]
NonNegativeFloat = Annotated[float, Ge(0)]
FiniteFloat = Annotated[float, Interval(gt=-math.inf, lt=math.inf)]
Probability = Annotated[float, Interval(ge=0, lt=1), Wording("a probability")]
UnitFloat = Annotated[float, Interval(ge=0, le=1)]
Share = Annotated[UnitFloat, Wording("a share")]
PositiveShare = Annotated[float, Interval(gt=0, le=1), Wording("a share")]


class Range:
    """The numbers that satisfy the constraints in `metadata`; `int` among them counts in whole numbers.

    of_several: whether a tuple of such numbers is allowed, too.
    """

    def __init__(self, metadata: tuple[Any, ...], of_several: bool = False) -> None:
        self.low, self.high = -math.inf, math.inf
        self.includes_low, self.includes_high = False, False
        self.whole, self.of_several = int in metadata, of_several
        # The last: it belongs to the outermost `Annotated`.
        self.wording = next((item for item in reversed(metadata) if isinstance(item, Wording)), Wording())
        for constraint in _constraints(metadata):
            match constraint:
                case Ge():
                    self.low, self.includes_low = constraint.ge, True
                case Gt():
                    self.low = constraint.gt
                case Le():
                    self.high, self.includes_high = constraint.le, True
                case Lt():
                    self.high = constraint.lt
        low, high = self.low, self.high
        # Compiled once, as a configuration of a large model has hundreds of numbers.
        self.contains: Callable[[Any], bool] = {
            (False, False): lambda value: low < value < high,
            (False, True): lambda value: low < value <= high,
            (True, False): lambda value: low <= value < high,
            (True, True): lambda value: low <= value <= high,
        }[self.includes_low, self.includes_high]

    def __str__(self) -> str:
        """Return the range in words: "1 or more", "a number above 0", "a probability in [0, 1)"."""
        noun, low, high = self.wording.noun, self.low, self.high
        if (low, high) == (-math.inf, math.inf):
            return "a finite number"
        if high == math.inf:
            return f"{low} or more" if self.includes_low else f"{noun} above {low}"
        if low == -math.inf:
            return f"at most {high}" if self.includes_high else f"{noun} below {high}"
        if self.includes_low and self.includes_high:
            return f"{low} to {high}" if self.whole else f"{noun} from {low} to {high}"
        return f"{noun} in {'(['[self.includes_low]}{low}, {high}{')]'[self.includes_high]}"

    def check(self, name: str, value: Any) -> None:
        """Raise `InputError` unless every number in `value`, called `name` by the user, is in the range."""
        if isinstance(value, tuple | list):
            for index, item in enumerate(value):
                self.check(f"{name}[{index}]", item)
        elif value is not None and not (isinstance(value, numbers.Real) and self.contains(value)):
            fix = f"; {self.wording.fix}" if self.wording.fix else ""
            raise InputError(f"{name}: expected {self}, got {quote(value)}{fix}")


def check_range(name: str, value: Any, *constraints: Any) -> None:
    """Raise `InputError` unless every number in `value` satisfies the constraints, such as `Ge(1)`."""
    Range(constraints).check(name, value)


def check_ranges(config: Any, prefix: str = "") -> None:
    """Raise `InputError` for a field of a dataclass outside its range; `prefix` precedes the field's name."""
    for name, interval in ranges(type(config)).items():
        value = getattr(config, name)
        try:
            inside = value is None or interval.contains(value)
        except (TypeError, RuntimeError):  # several numbers, or none; a tensor of several
            inside = False
        if inside:
            continue
        interval.check(prefix + name, value)
        if not interval.of_several and isinstance(value, tuple | list):
            raise InputError(f"{prefix}{name}: expected {interval}, got {quote(value)}")


@functools.cache
def ranges(cls: type) -> dict[str, Range]:
    """Return the ranges of a dataclass's fields by their names.

    A subclass that declares a field again inherits its range, unless the new type has another range.
    """
    inherited = [ranges(base) for base in cls.__bases__ if dataclasses.is_dataclass(base)]
    hints = typing.get_type_hints(cls, include_extras=True)
    metadata = {field.name: {*_metadata(hints[field.name])} for field in dataclasses.fields(cls)}
    assert all(len(each) <= 1 for each in metadata.values()), f"{cls.__name__}: two ranges of a field"
    own = {name: Range(items, _has_tuple(hints[name])) for name, each in metadata.items() for items in each}
    return dict(ChainMap(own, *inherited))


def check_sizes(config: Any) -> None:
    """Raise `InputError` for an integer above `SIZE` in any part of a configuration, seeds apart."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, int) and item > SIZE and field.name not in SEEDS:
                check_range(field.name, item, Le(SIZE))
            if dataclasses.is_dataclass(item):
                check_sizes(item)


def _constraints(metadata: tuple[Any, ...]) -> Iterator[Any]:
    """Yield the constraints in `metadata`; an `Interval` stands for several."""
    for item in metadata:
        yield from item if isinstance(item, Interval) else (item,)


def _has_tuple(hint: Any) -> bool:
    """Return whether a type allows a tuple of values."""
    return typing.get_origin(hint) is tuple or any(map(_has_tuple, typing.get_args(hint)))


def _metadata(hint: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the metadata with a constraint in `hint`."""
    if any(isinstance(item, Ge | Gt | Le | Lt) for item in _constraints(getattr(hint, "__metadata__", ()))):
        yield hint.__origin__, *hint.__metadata__
    for part in typing.get_args(hint):
        yield from _metadata(part)
