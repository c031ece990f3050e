"""The registry: names once, wildcards, nearest names."""

import pytest

from polyformer.core.errors import InputError
from polyformer.core.registry import Registry
from polyformer.models.presets import create_model


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


@pytest.mark.parametrize(
    ("name", "part", "member"),
    [
        ("svd", "attention", "svd"),
        ("lsh", "attention", "lsh"),
        ("DeBERTa", "position", "deberta"),
        ("SortCut", "attention", "sort_cut"),
    ],
)
def test_a_member_where_a_model_is_expected_is_explained(name: str, part: str, member: str):
    way = f'--model.{part} {member} or create_model(..., {part}="{member}")'
    with pytest.raises(InputError) as caught:
        create_model(name)
    assert way in str(caught.value)
    create_model("encoder-tiny" if part == "attention" else "decoder-tiny", **{part: member})


def test_suggestions_are_of_all_kinds(complaint):
    assert "it is a recipe (polyformer train longformer); did you mean 'longformer-base'" in complaint(
        "show", "longformer"
    )
    assert 'it is a model (create_model("gpt2"))' in complaint("train", "gpt2")
    assert "'sort_cut' (an attention member: --model.attention sort_cut" in complaint("show", "sort_cutt")
    assert "did you mean 'roformer'" in complaint("list", "roformr")


def test_a_name_is_taken_once():
    registry = fruits()
    with pytest.raises(InputError, match="fruit 'pear' is registered already"):
        registry.register("pear")
    assert registry["pear"] == 0
