"""Patterns as expressions from anywhere: what cannot be meant is named, at once and in few words."""

import pytest

from polyformer.attention.patterns.base import Pattern
from polyformer.core.errors import InputError


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Random(1000000000, 1)", "Random: blocks: expected 1 to 256, got 1000000000"),
        ("Window(10**21)", r"expected names joined by & and [|], got '10 \*\* 21'"),
        ("Window(1000000000000000000000)", "expected integers of at most 64 bits"),
        ("Window(2147483648)", "Window: before: expected at most 2147483647, got 2147483648"),
        ("Window('8')", "pattern Window: before: expected int, got '8'"),
        ("Window(1.5)", "pattern Window: before: expected int, got 1.5"),
        ("Window({[]: 1})", "expected a plain value"),
        ("Window(" + "-" * 5000 + "1)", "expected an expression like|nested too deeply"),
        ("|".join(["Full"] * 3000), "expected an expression like|nested too deeply"),
        ("Window(\ud800)", "expected an expression like"),
        ("a" * 600_000, "it has 600000 characters, expected at most 65536"),
        ("PerHead(Window(3))", r"patterns: expected a list, got Window\(before=3"),
        ("Window(size=3)", "unknown option of pattern Window 'size'"),
    ],
    ids=range(13),
)
def test_what_cannot_be_meant(text: str, message: str):
    with pytest.raises(InputError, match=message) as caught:
        Pattern.from_text(text)
    assert len(str(caught.value)) < 500
