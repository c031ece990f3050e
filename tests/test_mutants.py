"""The faults that `mutants.py` makes change code, and reach functions that exist already."""

import math
import random

import pytest

from mutants import candidates, in_a_fork, install, mutated
from polyformer.attention.positions.rope import frequencies

FREQUENCIES = "src/polyformer/attention/positions/rope.py", "frequencies"


def test_every_mutation_changes_the_code() -> None:
    places = random.Random(1).sample(candidates(), 40)
    assert [place for place in places if not mutated(place)[1]] == []


def test_a_mutant_lives_in_a_process_of_its_own() -> None:
    code, change = mutated([*FREQUENCIES, 0])
    assert change == "theta = config.base ** (-even / width) -> theta = config.base ** (-even * width)"
    before = frequencies.__code__

    def replaced() -> bool:
        install(code)
        return frequencies.__code__ != before

    assert in_a_fork(replaced, 60) is True
    assert frequencies.__code__ == before


@pytest.mark.parametrize("job", [lambda: math.sqrt(-1), lambda: [0 for _ in iter(int, 1)]])
def test_a_mutant_that_crashes_or_does_not_end_has_no_result(job) -> None:
    assert in_a_fork(job, 2) is None
