"""Text from outside: its limits, and parts written as expressions, of which nothing is executed."""

from typing import Any

import pytest

from polyformer.core.errors import InputError
from polyformer.core.files import read_json
from polyformer.core.parsing import (
    check_numbers,
    dump_yaml,
    first_name,
    literal,
    parse_expression,
    parse_json,
    parse_yaml,
    with_options,
)

LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi")
)
"""Nine levels of nine aliases: 400 bytes that stand for 9^9 words."""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LAUGHS, r"f: line 2: aliases \(\*name\) are not read"),
        ("&a [*a]", "aliases"),
        ("[" * 1000, "f: nested too deeply, expected at most 64 levels"),
        ("{a: " * 70 + "1" + "}" * 70, "nested too deeply"),
        ("a: 1\nb: 2\na: 3", "f: the mapping at line 1 has a name twice"),
        ("a: .nan", "f: line 1: expected finite numbers, got .nan"),
        ("a: -.inf", "finite"),
        (f"a: {'9' * 10000}", "f: line 1: expected numbers of at most 64 digits"),
        ("a: 99999999999999999999999", "integers of at most 64 bits"),
        ("1" + ":1" * 30, "integers of at most 64 bits"),
        ("!!python/object/apply:os.system [ls]", "f: line 1: the tag 'tag:yaml.org,2002:python/object"),
        ("!!set {a, b}", "tag"),
        ("!!int ''", "f: not YAML"),
        ("a: [", "f, line 1: not YAML .*; look"),
        ("\x00", "not YAML"),
        ("? [1]\n: 2", "f, line 1: not YAML .found unhashable key."),
        (" " * 2**18 + "a", "it has 262145 characters, expected at most 262144"),
    ],
)
def test_yaml_that_is_refused(text: str, message: str):
    with pytest.raises(InputError, match=message):
        parse_yaml(text, "f", "; look")


def test_yaml_reads_numbers_without_a_point_and_dates_as_texts():
    data = parse_yaml("{a: 1e-4, b: 1E5, c: '1e5', d: 2024-01-01, e: 12:30, f: yes}", "f")
    assert data == {"a": 1e-4, "b": 1e5, "c": "1e5", "d": "2024-01-01", "e": 750, "f": True}


@pytest.mark.parametrize("value", ["1e-4", "1e5", "-3.E+7", "2024-01-01", "*a", "null", 1e-5, 1e22, [1, [2]]])
def test_yaml_survives_a_round_trip(value: Any):
    shared = {"x": value}
    assert parse_yaml(dump_yaml({"b": shared, "a": shared}), "f") == {"b": shared, "a": shared}


def test_no_limit_as_transformers_writes_it():
    assert parse_json(f'{{"model_max_length": {int(1e30)}}}', "f") == {"model_max_length": int(1e30)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 5000, "f: nested too deeply"),
        ("[" * 100 + "]" * 100, "f: nested too deeply"),
        ('{"a": [' * 40 + "]}" * 40, "f: nested too deeply"),
        ('{"a": 1, "b": {"c": 1, "c": 1}}', "f: the name 'c' stands twice in one object"),
        ("[NaN]", "f: expected finite numbers, got nan"),
        ("[-Infinity]", "finite"),
        ("[1e999]", "finite"),
        ("9" * 10000, "f: expected integers of at most 64 bits, got one of 10000 digits"),
        ("99999999999999999999", "64 bits"),
        ('["\\ud800"]', "half of a character"),
        (b"\xff\xfea", "not JSON"),
        ("", "not JSON .*line 1, column 1.; look"),
        ("[]", r"f: expected an object, got \[\]"),
        ("null", "f: expected an object, got None"),
        (f'"{"a" * 1000}"', "expected an object, got 'aaa"),
    ],
)
def test_json_that_is_refused(text: str | bytes, message: str):
    with pytest.raises(InputError, match=message):
        parse_json(text, "f", dict, way_out="; look")


def test_json_within_the_bounds():
    assert parse_json("[" * 64 + "]" * 64, "f", list)
    assert (
        parse_json('{"a": "\\ud83d\\ude00", "b": -9223372036854775808}', "f", dict)["a"]
        == "\N{GRINNING FACE}"
    )
    assert parse_json("[NaN]", "f", list, finite=False)[0] != 0


def test_a_file_is_read_no_further_than_its_bound(tmp_path, monkeypatch):
    monkeypatch.setattr("polyformer.core.files.JSON_BYTES", 10)
    path = tmp_path / "config.json"
    path.write_text("{}" + " " * 9)
    with pytest.raises(InputError, match=r"config.json: larger than 10 bytes"):
        read_json(path)


@pytest.mark.parametrize(
    "text",
    [
        "-" * 5000 + "1",
        "(" * 300 + ")" * 300,
        " | ".join(["a"] * 3000),
        "\ud800",
        "a(\x00)",
        "9" * 5000,
        "a b",
        "a" * 2**17,
        "f(" * 150 + ")" * 150,
    ],
    ids=range(9),
)
def test_expressions_that_are_refused(text: str):
    with pytest.raises(InputError, match=r"^p: ") as caught:
        parse_expression(text, "p", "an expression")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "text", ["{[]: 1}", "{{1}}", "10**3", "f(1)", "1e999", "99999999999999999999999", "-'a'"]
)
def test_literals_that_are_refused(text: str):
    with pytest.raises(InputError, match=r"^p: expected "):
        literal(parse_expression(text, "p", "an expression"), "p")


def test_numbers_are_checked_however_deep_they_stand():
    check_numbers({"a": [1, (2.5, {"b": None})]}, "p")
    with pytest.raises(InputError, match="finite numbers, got nan"):
        check_numbers({"a": [1, (2.5, {"b": float("nan")})]}, "p")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lsh", {"kind": "lsh"}),
        ("lsh()", {"kind": "lsh"}),
        (" lsh(buckets=8, window=-16) ", {"kind": "lsh", "buckets": 8, "window": -16}),
        ("inverse-sqrt(warmup=10)", {"kind": "inverse-sqrt", "warmup": 10}),
        ("dense(bias=false, activation=gelu)", {"kind": "dense", "bias": False, "activation": "gelu"}),
        ("dense(bias=False, activation='gelu')", {"kind": "dense", "bias": False, "activation": "gelu"}),
        ("x(a=null, b=[1, 2.5], c={'d': 1})", {"kind": "x", "a": None, "b": [1, 2.5], "c": {"d": 1}}),
        ("softmax(pattern=Window(3) | Full)", {"kind": "softmax", "pattern": "Window(3) | Full"}),
        (
            "alternate(mechanisms=[lsh(buckets=2), softmax])",
            {"kind": "alternate", "mechanisms": ["lsh(buckets=2)", "softmax"]},
        ),
    ],
)
def test_an_expression_is_a_mapping(text: str, expected: dict[str, Any]):
    assert with_options(text, "part") == expected


@pytest.mark.parametrize(
    "text", ["lsh(", "lsh(8)", "lsh(buckets=)", "lsh(a=1)(b=2)", "lsh(a=1) + 2", "lsh(**{})x", "a(b=1); c"]
)
def test_anything_else_is_refused(text: str):
    with pytest.raises(InputError, match=r"part: expected 'kind\(name=value, \.\.\.\)', got '"):
        with_options(text, "part")


@pytest.mark.parametrize("value", ["1 + x", "lambda: 0", "x.y", "x[0]", "not x", "f'{x}'", "[i for i in x]"])
def test_nothing_is_executed(value: str):
    with pytest.raises(InputError, match="part: expected a plain value, got "):
        with_options(f"lsh(a={value})", "part")


@pytest.mark.parametrize(
    ("text", "name"),
    [("lsh", "lsh"), ("Window(3)|Full", "Window"), (" ((Full) & x)", "Full"), ("Full&x", "Full"), ("", "")],
)
def test_the_first_name_says_what_is_meant(text: str, name: str):
    assert first_name(text) == name
