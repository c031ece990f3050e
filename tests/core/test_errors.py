"""Errors for users: near names first, all names when few, some when many."""

import warnings
from pathlib import Path

import pytest
import torch

from polyformer.core.argument_types import names_wrong_types
from polyformer.core.errors import Caution, InputError, caution, quote, unknown


def test_near_names_are_offered():
    error = unknown("model", "gpt3", ["gpt2", "bert-base", "transformer-base"])
    assert str(error) == "unknown model 'gpt3': did you mean 'gpt2'?"
    assert str(unknown("model", "bert", ["bert-base", "bert-bass"])).endswith("'bert-bass' or 'bert-base'?")


def test_all_names_are_listed_when_they_are_few():
    assert str(unknown("kind", "zzz", ["b", "a"])) == "unknown kind 'zzz': expected one of 'a', 'b'"
    assert str(unknown("kind", "zzz", [])) == "unknown kind 'zzz': expected one of nothing"


def test_some_names_are_listed_when_they_are_many():
    names = [f"name{i:02}" for i in range(20)]
    text = str(unknown("kind", "zzz", names))
    assert text.startswith("unknown kind 'zzz': expected one of 20 names, such as 'name00', 'name01'")
    assert "name06" not in text


def test_it_is_a_value_error_whatever_was_given():
    assert isinstance(unknown("kind", None, ["a"]), ValueError)
    with pytest.raises(InputError):
        raise unknown("kind", ["a"], ["a"])


def laughs() -> list[object]:
    """A list whose `repr` has 10^12 entries."""
    data: list[object] = ["lol"] * 10
    for _ in range(11):
        data = [data] * 10
    return data


LARGE = (
    *(laughs(), {"a": laughs()}, "a" * 10**6, b"a" * 10**6, 10**6000, [10**6000], ["\n" * 300] * 300),
    {i: i for i in range(10**5)},
    {"a" * 500: {"b" * 500: {"c" * 500: 1}}},
)


@pytest.mark.parametrize("value", LARGE, ids=range(len(LARGE)))
def test_a_quotation_is_short_whatever_is_quoted(value: object):
    assert 0 < len(quote(value)) <= 200
    assert len(str(unknown("kind", value, ["a"]))) < 300


def test_a_short_value_is_quoted_whole_and_a_long_one_keeps_its_ends():
    for value in ({"b": 1, "a": (2, None)}, [1.5, "é\n"], "text", b"\x00", -3, None):
        assert quote(value) == repr(value)
    assert quote("a" * 500 + "z").endswith("z'")


def test_a_message_is_bounded_and_keeps_its_end():
    text = str(InputError("a" * 10**6 + " the way out"))
    assert len(text) == 2000
    assert text.endswith("the way out")


WRAPPERS = {
    "none": lambda function: function,
    "torch": torch.no_grad(),
    "names of types": names_wrong_types,
    "both": lambda function: names_wrong_types(torch.no_grad()(function)),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_warning_names_the_line_of_the_caller_whatever_wraps_the_function(wrapper: str):
    wrapped = WRAPPERS[wrapper](caution)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default", Caution)
        for _ in range(2):
            wrapped("take care")  # THE LINE
        wrapped("take care")
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    assert [(warning.category, str(warning.message), warning.filename) for warning in said] == [
        (Caution, "take care", __file__)
    ] * 2, "once for each line"
    assert "THE LINE" in lines[said[0].lineno - 1]
