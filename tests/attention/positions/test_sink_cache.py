"""Positions counted inside a cache of first and latest tokens: the equation of every scheme that can."""

import dataclasses
from typing import Any

import pytest
import test_composition as schemes
from naive import Naive, Pair, attention, randomised
from torch import Tensor

from polyformer.attention.positions import PositionConfig, SinkCache
from polyformer.attention.positions.rope import RopeConfig
from polyformer.attention.positions.rope_extensions import DynamicNtkConfig
from polyformer.core.errors import InputError

CACHE = SinkCache(first=2, length=3)
COUNTING = [name for name, scheme in schemes.SCHEMES.items() if scheme.build(schemes.SHAPE).counts_in_cache]
LENGTH, PLACES = schemes.LENGTH, schemes.PLACES


def sees(i: int, j: int) -> bool:
    return i - j < CACHE.length or j < CACHE.first


class InCache(Naive):
    """A scheme with the places in a cache, in which a query is the last entry, as positions."""

    def __init__(self, scheme: Naive):
        self.scheme = scheme

    def score(self, q: Tensor, k: Tensor, pair: Pair) -> Tensor:
        place = min(pair.i, CACHE.first + CACHE.length - 1)
        moved = 0 if pair.j < CACHE.first and pair.i - pair.j >= CACHE.length else pair.i - place
        return self.scheme.score(q, k, dataclasses.replace(pair, i=place, j=pair.j - moved))


def counting(config: PositionConfig) -> Any:
    position = randomised(config.build(schemes.SHAPE))
    position.count_in_cache(CACHE)
    return position


@pytest.mark.parametrize("name", COUNTING)
@pytest.mark.parametrize(
    ("place", "split"), [("plain", [3, 1, 4]), ("padded-packed", [8]), ("padded-packed", [5, 1, 2])]
)
def test_a_scheme_that_counts_in_a_cache_is_its_equation(name: str, place: str, split: list[int]):
    """Outputs and every gradient; in one pass and in chunks."""
    config = schemes.SCHEMES[name]
    if getattr(config, "extension", None) is not None and config.build(schemes.SHAPE).rotates_parts:
        config = dataclasses.replace(  # type: ignore[type-var]
            config, extension=dataclasses.replace(config.extension, original_max_positions=CACHE.size)
        )
    position, tensors = counting(config), schemes.inputs(kv_heads=2)
    actual = schemes.run(position, tensors, CACHE.pattern, split, True, **PLACES[place])
    context = schemes.extended(schemes.NO_TOKENS, slice(0, LENGTH), **PLACES[place]).context(LENGTH, True)
    expected = attention(InCache(schemes.equation(position, config)), *tensors, context, sees)
    schemes.same(actual, expected, [*tensors, *position.parameters()], PLACES[place]["mask"])


def test_the_schemes_that_count_in_a_cache_are_those_of_distances():
    assert {schemes.SCHEMES[name].kind for name in COUNTING} == {
        "alibi",
        "none",
        "rope",
        "t5",
        "transformer_xl",
        "xlnet",
    }


def test_an_extension_by_length_needs_texts_that_are_longer_than_the_cache():
    dynamic = RopeConfig(extension=DynamicNtkConfig(factor=2.0, original_max_positions=8))
    with pytest.raises(
        InputError, match=r"at most original_max_positions \d, got 9; use a shorter memory, or"
    ):
        dynamic.build(schemes.SHAPE).count_in_cache(SinkCache(first=4, length=5))
