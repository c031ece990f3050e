"""Ranges in the types of fields: what they accept, how they are worded, and that decoding ignores them."""

import dataclasses
import math
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import pytest
from annotated_types import Ge, Gt, Interval, Le, Lt

from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.ranges import (
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Probability,
    Share,
    UnitFloat,
    Wording,
    check_range,
    check_ranges,
    check_sizes,
    ranges,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part(Config):
    """A part of a configuration."""

    length: NonNegativeInt = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ranged(Config):
    """A field for each place of a range in a type."""

    heads: PositiveInt = 8
    head_size: PositiveInt | None = None
    dropout: Probability = 0.1
    scale: Annotated[PositiveFloat, Wording(fix="leave it out for 1")] = 1.0
    sides: tuple[PositiveInt, PositiveInt] = (2, 3)
    words: tuple[tuple[NonNegativeInt, ...], ...] = ()
    threshold: UnitFloat | tuple[UnitFloat, ...] = 1.0
    layers: Literal["low"] | tuple[int, ...] = "low"
    name: str = "any"
    seed: int = 0
    parts: tuple[Part, ...] = ()
    kind: ClassVar[str] = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Narrower(Ranged):
    """A field with another range, a field declared again, a field with its own check."""

    heads: Annotated[int, Interval(ge=2, le=4)] = 2
    head_size: int = 1

    def __post_init__(self) -> None:
        if self.seed % self.heads:
            raise InputError("seed: expected a multiple of heads")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 0}, "heads: expected 1 or more, got 0"),
        ({"heads": "2"}, "heads: expected 1 or more, got '2'"),
        ({"head_size": 0}, "head_size: expected 1 or more, got 0"),
        ({"dropout": 1}, "dropout: expected a probability in [0, 1), got 1"),
        ({"dropout": -0.1}, "dropout: expected a probability in [0, 1), got -0.1"),
        ({"dropout": math.nan}, "dropout: expected a probability in [0, 1), got nan"),
        ({"scale": 0.0}, "scale: expected a number above 0, got 0.0; leave it out for 1"),
        ({"scale": math.inf}, "scale: expected a number above 0, got inf; leave it out for 1"),
        ({"sides": (2, 0)}, "sides[1]: expected 1 or more, got 0"),
        ({"words": ((1, 2), (3, -1))}, "words[1][1]: expected 0 or more, got -1"),
        ({"threshold": 2.0}, "threshold: expected a number from 0 to 1, got 2.0"),
        ({"threshold": (0.5, 2.0)}, "threshold[1]: expected a number from 0 to 1, got 2.0"),
    ],
)
def test_a_value_outside_the_range_of_its_field(options: dict[str, Any], message: str):
    with pytest.raises(InputError) as error:
        Ranged(**options)
    assert str(error.value) == message


def test_values_inside():
    Ranged(heads=1, head_size=None, dropout=0, scale=np.float64(1e-9), sides=(1, 1), words=((), (0,)))
    Ranged(head_size=1, threshold=(0.0, 1), layers=(), heads=np.int64(2))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("constraints", "inside", "outside", "words"),
    [
        ([Ge(2)], 2, 1, "2 or more"),
        ([Ge(1)], 10**400, -(10**400), "1 or more"),
        ([Gt(0)], 0.1, 0, "a number above 0"),
        ([Le(3)], 3, 4, "at most 3"),
        ([Lt(3)], 2.9, 3, "a number below 3"),
        ([Ge(1), Lt(2)], 1, 2, "a number in [1, 2)"),
        ([Interval(gt=0, le=1)], 1, 0, "a number in (0, 1]"),
        ([Interval(gt=0, lt=1)], 0.5, 1, "a number in (0, 1)"),
        ([Interval(ge=0, le=0.5), Wording("a share")], 0.5, 0.6, "a share from 0 to 0.5"),
        ([int, Interval(ge=1, le=3)], 3, 4, "1 to 3"),
        ([Interval(gt=-math.inf, lt=math.inf)], -1e300, -math.inf, "a finite number"),
    ],
)
def test_intervals_in_words(constraints: list[Any], inside: float, outside: float, words: str):
    check_range("x", inside, *constraints)
    with pytest.raises(InputError) as error:
        check_range("x", outside, *constraints)
    assert str(error.value).startswith(f"x: expected {words}, got ")


def test_the_names_of_the_usual_ranges():
    @dataclasses.dataclass(frozen=True)
    class Usual:
        a: PositiveInt
        b: NonNegativeInt
        c: PositiveFloat
        d: NonNegativeFloat
        e: FiniteFloat
        f: Probability
        g: UnitFloat
        h: Share
        i: PositiveShare

    assert [str(interval) for interval in ranges(Usual).values()] == [
        "1 or more",
        "0 or more",
        "a number above 0",
        "0 or more",
        "a finite number",
        "a probability in [0, 1)",
        "a number from 0 to 1",
        "a share from 0 to 1",
        "a share in (0, 1]",
    ]


def test_a_file_is_checked_with_the_path_of_the_value():
    with pytest.raises(InputError, match=r"^model\.parts\[0\]\.length: expected 0 or more, got -1$"):
        Ranged.from_dict({"parts": [{"length": -1}]}, "model")
    with pytest.raises(InputError, match=r"^heads: expected int, got '2'$"):
        Ranged.from_dict({"heads": "2"})
    assert Ranged.from_dict(Ranged(heads=3).to_dict()) == Ranged(heads=3)


def test_an_override_is_checked():
    assert Ranged().override("heads", 2).heads == 2
    with pytest.raises(InputError, match="heads: expected 1 or more, got 0"):
        Ranged().override("heads", 0)


def test_a_subclass_inherits_ranges_and_may_narrow_them():
    assert str(ranges(Narrower)["heads"]) == "2 to 4"
    assert str(ranges(Narrower)["head_size"]) == "1 or more"
    with pytest.raises(InputError, match="heads: expected 2 to 4, got 0"):
        Narrower(heads=0)  # before its own check, which divides by it
    with pytest.raises(InputError, match="seed: expected a multiple of heads"):
        Narrower(seed=1)


def test_a_choice_is_checked_in_python_too():
    with pytest.raises(InputError, match="unknown layers 'high'"):
        Ranged(layers="high")  # type: ignore[arg-type]


def test_a_plain_dataclass_may_prefix_its_names():
    @dataclasses.dataclass(frozen=True)
    class Plain:
        size: PositiveInt = 1

        def __post_init__(self) -> None:
            check_ranges(self, "Plain: ")

    with pytest.raises(InputError, match=r"^Plain: size: expected 1 or more, got 0$"):
        Plain(0)


def test_a_field_has_a_single_range():
    @dataclasses.dataclass(frozen=True)
    class Two:
        size: PositiveInt | tuple[NonNegativeInt, ...] = 1

    with pytest.raises(AssertionError, match="Two: two ranges of a field"):
        ranges(Two)


def test_integers_above_the_limit_of_sizes():
    check_sizes(Ranged(seed=2**40))
    with pytest.raises(InputError, match="length: expected at most 16777216, got 16777217"):
        check_sizes(Ranged(parts=(Part(), Part(length=2**24 + 1))))
