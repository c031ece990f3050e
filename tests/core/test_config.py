"""The configuration base: strict about names, kinds and types, and both ways through JSON and YAML."""

import dataclasses
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

from polyformer.attention.patterns import Pattern, Window
from polyformer.core.config import Config, option_names
from polyformer.core.errors import InputError
from polyformer.core.ranges import PositiveInt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape(Config):
    color: str = "red"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Circle(Shape):
    radius: float = 1.0

    kind: ClassVar[str] = "circle"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Square(Shape):
    side: int

    kind: ClassVar[str] = "square"

    def __post_init__(self) -> None:
        if self.side < 0:
            raise InputError(f"side: expected 0 or more, got {self.side}")

    @classmethod
    def examples(cls) -> tuple["Square", ...]:
        return (cls(side=2),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner(Config):
    rate: float = 1e-3
    size: int = 4
    shape: Shape = Circle()


@dataclasses.dataclass(frozen=True)
class Extra(Config):
    size: int = 4
    shape: Shape = Circle()

    made_by_options: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Holder(Config):
    extra: Extra | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer(Config):
    size: int = 1
    inner: Inner = Inner()
    other: Inner | None = None
    mode: Literal["fast", "slow"] = "fast"
    pair: tuple[int, float] = (1, 2.0)
    sides: tuple[int, int] = (3, 4)
    box: tuple[PositiveInt, PositiveInt, PositiveInt] | None = None
    many: tuple[int, ...] = ()
    table: dict[str, float] = dataclasses.field(default_factory=dict)
    place: Path | str | None = None
    flag: bool = False
    pattern: Pattern | None = None
    free: Any = None


EVERYTHING = Outer(
    size=7,
    inner=Inner(shape=Square(side=3)),
    other=Inner(rate=0.5),
    mode="slow",
    pair=(3, 4.5),
    many=(1, 2),
    table={"a": 1.5},
    place="here",
    flag=True,
    pattern=Window(3) | Window(5, 0),
    free=[1, {"b": None}],
)


@pytest.mark.parametrize("config", [Outer(), EVERYTHING])
def test_a_configuration_survives_json_yaml_and_dicts(config: Outer):
    assert Outer.from_json(config.to_json()) == config
    assert Outer.from_yaml(config.to_yaml()) == config
    assert Outer.from_dict(config.to_dict()) == config


def test_the_kind_comes_first_and_patterns_are_text():
    data = EVERYTHING.to_dict()
    assert list(data["inner"]["shape"]) == ["kind", "color", "side"]
    assert data["pattern"] == (Window(3) | Window(5, 0)).to_text()
    assert "kind" not in data


def test_a_bare_kind_stands_for_its_defaults():
    assert Shape.from_dict("circle") == Circle()
    assert Inner.from_dict({"shape": "circle"}) == Inner()
    assert Shape.from_dict({"kind": "square", "side": 5}) == Square(side=5)


def test_a_family_knows_its_members():
    assert Shape.kinds == {"circle": Circle, "square": Square}
    assert Square.family is Shape
    assert Square.examples() == (Square(side=2),)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"sise": 3}, "unknown option of Outer 'sise': did you mean 'size'"),
        ({"inner": {"raet": 1.0}}, "unknown option of inner 'raet': did you mean 'rate'"),
        ({"inner": {"shape": "circel"}}, "unknown kind of inner.shape 'circel': did you mean 'circle'"),
        ({"inner": {"shape": {"kind": ["x"]}}}, "unknown kind of inner.shape ['x']: expected one of"),
        ({"inner": {"shape": {"color": "red"}}}, "inner.shape: expected a 'kind', one of 'circle', 'square'"),
        ({"inner": {"shape": "square"}}, "inner.shape: 'side' is missing and has no default"),
        ({"inner": {"shape": {"kind": "square", "side": -1}}}, "side: expected 0 or more, got -1"),
        ({"inner": 3}, "inner: expected a mapping of names to values, got 3"),
        ({"size": "7"}, "size: expected int, got '7'"),
        ({"size": 7.0}, "size: expected int, got 7.0"),
        ({"size": True}, "size: expected int, got True"),
        ({"inner": {"rate": "fast"}}, "inner.rate: expected float, got 'fast'"),
        ({"inner": {"rate": "1e3"}}, "inner.rate: expected float, got '1e3'"),
        ({"inner": {"rate": float("nan")}}, "inner.rate: expected finite numbers, got nan"),
        ({"inner": {"rate": 10**400}}, "inner.rate: expected integers of at most 64 bits"),
        ({"size": 2**70}, "size: expected integers of at most 64 bits"),
        ({"inner": {"rate": True}}, "inner.rate: expected float, got True"),
        ({"flag": 1}, "flag: expected bool, got 1"),
        ({"mode": "fats"}, "unknown mode 'fats': did you mean 'fast'"),
        ({"pair": 3}, "pair: expected a list, got 3"),
        ({"pair": [1]}, "pair: expected 2 values, got 1: [1]"),
        ({"pair": [1, "x"]}, "pair[1]: expected float, got 'x'"),
        ({"many": [1, None]}, "many[1]: expected int, got None"),
        ({"table": [1]}, "table: expected a mapping, got [1]"),
        ({"table": {"a": "b"}}, "table.a: expected float, got 'b'"),
        ({"place": 3}, "place: expected Path, got 3; or place: expected str, got 3"),
        ({"other": {"rate": None}}, "other.rate: expected float, got None"),
        ({"pattern": "Windw(3)"}, "unknown pattern 'Windw': did you mean 'Window'"),
        ([1], "Outer: expected a mapping of names to values, got [1]"),
    ],
)
def test_unknown_options_and_wrong_types_are_refused(data: object, message: str):
    with pytest.raises(InputError) as caught:
        Outer.from_dict(data)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("text", ["1e-4", "0.0001", "1.0e-4"])
def test_numbers_as_yaml_writes_them(text: str):
    """YAML 1.1 reads 1e-4 as text, and 3 as an integer."""
    assert Outer.from_yaml(f"inner: {{rate: {text}}}").inner.rate == 1e-4
    rate = Outer.from_yaml("inner: {rate: 3}").inner.rate
    assert rate == 3.0
    assert isinstance(rate, float)


def test_a_number_is_the_size_of_all_sides():
    config = Outer.from_dict({"sides": 7, "box": 2})
    assert (config.sides, config.box) == ((7, 7), (2, 2, 2))
    assert config == Outer.from_dict({"sides": [7, 7], "box": [2, 2, 2]})
    for data, message in (
        ({"sides": True}, "expected a list, got True"),
        ({"sides": 1.5}, "a list, got 1.5"),
    ):
        with pytest.raises(InputError, match=message):
            Outer.from_dict(data)
    with pytest.raises(InputError, match="many: expected a list, got 3"):
        Outer.from_dict({"many": 3})
    with pytest.raises(InputError, match=r"box\[0\]: expected 1 or more"):
        Outer.from_dict({"box": 0})


def test_a_bare_name_is_set_wherever_it_occurs():
    changed = dataclasses.replace(Outer(), other=Inner()).override("size", 9)
    assert changed.other is not None
    assert (changed.size, changed.inner.size, changed.other.size) == (9, 9, 9)
    assert Outer().override("color", "blue").inner.shape == Circle(color="blue")


def test_a_dotted_path_is_set_in_one_place():
    changed = dataclasses.replace(Outer(), other=Inner()).override("inner.size", 9)
    assert changed.other is not None
    assert (changed.size, changed.inner.size, changed.other.size) == (1, 9, 4)
    assert changed.override("inner.shape.radius", 2).inner.shape == Circle(radius=2.0)


def test_a_dotted_path_makes_an_optional_part_that_allows_it():
    changed = Holder().override("extra.size", 9)
    assert changed.extra == Extra(size=9)
    assert changed.override("extra.shape", {"kind": "square", "side": 3}).extra == Extra(9, Square(side=3))
    with pytest.raises(InputError, match="unknown option of extra 'sizes': did you mean 'size'"):
        Holder().override("extra.sizes", 9)


def test_overrides_are_decoded_and_checked():
    assert Outer().override("shape", {"kind": "square", "side": 3}).inner.shape == Square(side=3)
    assert Outer().override("shape", Square(side=3)).inner.shape == Square(side=3)
    assert Outer().override("rate", 1e-4).inner.rate == 1e-4
    with pytest.raises(InputError, match="size: expected int, got 'x'"):
        Outer().override("inner.size", "x")
    with pytest.raises(InputError, match="side: expected 0 or more, got -2"):
        Outer(inner=Inner(shape=Square(side=1))).override("side", -2)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("siz", "unknown option of Outer 'siz': did you mean 'size'"),
        ("inner.siz", "unknown option of Outer 'inner.siz'"),
        ("iner.size", "unknown option of Outer 'iner.size'"),
        ("other.size", "unknown option of Outer 'other.size'"),
        ("side", "unknown option of Outer 'side'"),
    ],
)
def test_overrides_of_what_is_not_there_are_refused(name: str, message: str):
    with pytest.raises(InputError) as caught:
        Outer().override(name, 1)
    assert str(caught.value).startswith(message)


def test_an_override_leaves_the_original_alone():
    config = Outer()
    config.override("size", 3)
    assert config == Outer()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.size = 3  # type: ignore[misc]


def test_option_names_are_those_of_the_whole_tree():
    assert {"size", "inner", "rate", "shape", "radius", "color", "pattern"} <= option_names(Outer())
    assert "side" not in option_names(Outer())
