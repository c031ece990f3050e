"""Parts written as expressions: what they mean, and what is refused without being executed."""

from typing import Any

import pytest

from polyformer.core.errors import InputError
from polyformer.core.parsing import first_name, with_options


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
