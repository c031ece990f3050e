"""Combinations that hold every pair of values of two axes."""

import itertools
from collections.abc import Sequence

import pytest

import registered
from pairwise import pairwise

AXES = [["ab", "xyz"], ["abc", "xy", "12"], ["abcde", "vwxyz", "1234", "pq"], ["a", "xy", "1"]]


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """As every test but the suite of every night has it."""
    monkeypatch.setattr(registered, "EVERYTHING", False)


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_every_pair_of_values_is_covered(axes: list[Sequence[str]]):
    chosen = pairwise(*axes)
    for first, second in itertools.combinations(range(len(axes)), 2):
        pairs = {(values[first], values[second]) for values in chosen}
        assert pairs == set(itertools.product(axes[first], axes[second]))
    assert len(set(chosen)) == len(chosen)


def test_it_is_smaller_than_the_product():
    assert pairwise("abc", "xy") == list(itertools.product("abc", "xy")), (
        "of two axes nothing can be left out"
    )
    assert len(pairwise("abcde", "vwxyz", "1234", "pq")) < 40  # 25 or more, out of 200
    assert len(pairwise("ab", "xy", "12")) == 4


def test_one_axis_is_returned_as_it_is():
    assert pairwise("abc") == [("a",), ("b",), ("c",)]
    assert pairwise() == [()]


def test_the_suite_of_every_night_gets_the_product(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(registered, "EVERYTHING", True)
    assert pairwise("ab", "xy", "12") == list(itertools.product("ab", "xy", "12"))


def test_it_is_the_same_each_time():
    assert pairwise("abc", "xyz", "12") == pairwise("abc", "xyz", "12")
