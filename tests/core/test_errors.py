"""Errors for users: near names first, all names when few, some when many."""

import pytest

from polyformer.core.errors import InputError, unknown


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
