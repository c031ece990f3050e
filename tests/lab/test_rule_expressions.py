"""Expressions: their numbers, and what they refuse."""

from typing import Any

import numpy as np
import pytest

from polyformer import InputError
from polyformer_lab.expression import evaluate
from polyformer_lab.results import Results
from polyformer_lab.rules import Invented, is_contradicted
from polyformer_lab.study import Claim, Study, study_names

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
        ("9 ** 9 ** 9 ** 9 > 1", True),  # of integers it would not end
        ("2 ** 70 - 2 ** 70 + 1", 1.0),
        ("1 / 0 > 1", True),
        ("0 / 0 > 1 or 0 / 0 <= 1", False),
        ("1 / (validation.loss[a, 8] - 1) > 1", [True, False]),
        (" + ".join(["1"] * 100), 100.0),
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("abs()", "cannot be computed"),
        ("abs(x, y)", "cannot be computed"),
        ("mean(x, x)", "cannot be computed"),
        ("min()", "cannot be computed"),
        ("first(x)", "cannot be computed"),
        ("10 ** 400 if x else 1", "is not allowed"),
        (f"{'9' * 400} > 1", "cannot be computed"),
        (f"{'9' * 5000} > 1", "expected an expression"),
        (" + ".join(["1"] * 9000), "nested too deeply|expected an expression"),
        (f"{'-' * 5000}1", "nested too deeply|expected an expression"),
        ("(" * 300 + "1" + ")" * 300, "expected an expression"),
        ("1\0", "expected an expression"),
        ("1 + " * 20_000 + "1", "at most 65536"),
        ("validation.loss[a, 'x':9]", "cannot be computed"),
    ],
)
def test_what_cannot_be_computed_is_an_error_in_words(text: str, message: str):
    study = Study(grid={"a": {"b": {}}, "size": {8: {}}})
    results = Results(study, [{"a": "a", "size": 8, "validation.loss": 1.0}])
    with pytest.raises(InputError, match=message):
        evaluate(text, results.lookup, {"x": np.float64(3), "y": np.ones(1)})


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"holds": ["__import__('os')"]}, "unknown function '__import__'"),
        ({"shown": ["meen(loss) > 1"]}, "did you mean 'mean'"),
        ({"define": {"gain": "loss[a] -"}}, "expected an expression"),
        ({"holds": ["abs() > 1"]}, "cannot be computed"),
    ],
)
def test_a_rule_is_checked_without_figures(rule: dict[str, Any], message: str):
    with pytest.raises(InputError, match=message):
        is_contradicted(Claim(**rule), Invented(3, 0))


def test_rules_of_the_library_pass_the_check():
    for name in study_names():
        for claim in Study.load(name).claims.values():
            is_contradicted(claim, Invented(3, 0))


def test_a_rule_over_growing_labels_passes_the_check():
    is_contradicted(
        Claim(define={"g": "growth(t[a, :]) - u[a, 128:512]"}, holds=["first(g) > 1"]), Invented(3, 0)
    )


def test_an_unknown_function_is_named():
    with pytest.raises(InputError, match="unknown function 'meen': did you mean 'mean'"):
        evaluate("meen(x)", lookup, {"x": 3})
