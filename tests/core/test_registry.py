"""The registry: names once, wildcards, nearest names."""

import pytest

from polyformer.core.errors import InputError
from polyformer.core.registry import Registry


def fruits() -> Registry[int]:
    registry: Registry[int] = Registry("fruit")
    for number, name in enumerate(["pear", "apple", "apricot"]):
        registry.register(name)(number)
    return registry


def test_things_are_found_by_name_in_the_order_they_came():
    assert fruits()["apple"] == 1
    assert list(fruits()) == ["pear", "apple", "apricot"]


def test_wildcards_are_sorted():
    assert fruits().names("ap*") == ["apple", "apricot"]
    assert fruits().names() == ["apple", "apricot", "pear"]
    assert fruits().names("z*") == []


def test_an_unknown_name_comes_with_the_nearest():
    with pytest.raises(InputError, match="unknown fruit 'aple': did you mean 'apple'"):
        fruits()["aple"]


def test_a_name_is_taken_once():
    registry = fruits()
    with pytest.raises(InputError, match="fruit 'pear' is registered already"):
        registry.register("pear")
    assert registry["pear"] == 0
