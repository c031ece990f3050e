"""Expressions: their numbers, and what they refuse."""

from typing import Any

import numpy as np
import pytest

from polyformer import InputError
from polyformer_lab.expression import evaluate

LOSSES = {("a", "8"): [1.0, 3.0], ("a", "16"): [2.0, 2.0], ("a", "32"): [4.0, 1.0]}


def lookup(metric: str, labels: tuple[Any, ...]) -> Any:
    assert metric == "validation.loss"
    if isinstance(labels[-1], slice):
        return np.array([*LOSSES.values()])
    return np.array(LOSSES[tuple(map(str, labels))])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("validation.loss[a, 16] - validation.loss['a', 8]", [1.0, -1.0]),
        ("mean(validation.loss[a, 8])", 2.0),
        ("std(validation.loss[a, 8])", 2**0.5),
        ("growth(validation.loss[a, :])", [[2.0, 2 / 3], [2.0, 0.5]]),
        ("high(validation.loss[a, :])", [4.0, 3.0]),
        ("last(validation.loss[a, :])", [4.0, 1.0]),
        ("min(validation.loss[a, 8], validation.loss[a, 16])", [1.0, 2.0]),
        ("ranks(validation.loss[a, :], -validation.loss[a, :])", [-1.0, -1.0]),
        ("1 < validation.loss[a, 8] <= x", [False, True]),
        ("not (validation.loss[a, 8] < 2) or x == 0", [False, True]),
        ("2 * x ** 2 / -3", -6.0),
    ],
)
def test_values(text: str, value: Any):
    np.testing.assert_allclose(evaluate(text, lookup, {"x": 3}), value)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "(lambda: 1)()",
        "[x for x in 'abc']",
        "'text'",
        "x if x else 2",
        "mean(x, key=3)",
        "validation.loss[f()]",
        "x[0].__class__[1]",
        "1 +",
    ],
)
def test_nothing_else_is_evaluated(text: str):
    with pytest.raises((InputError, AssertionError, KeyError)) as raised:
        evaluate(text, lookup, {"x": 3})
    assert not isinstance(raised.value, TypeError)


def test_an_unknown_function_is_named():
    with pytest.raises(InputError, match="unknown function 'meen': did you mean 'mean'"):
        evaluate("meen(x)", lookup, {"x": 3})
