"""Members of different axes combine: each pair runs, or an `InputError` says why not; none ends otherwise."""

import traceback
from collections import Counter

import pytest
from combinations import REFUSED, RUNS, attempt, axes, pairs

from registered import nightly

BY_DAY = {
    ("Mechanism", "differential", "Position", "shaw"): RUNS,
    ("Mechanism", "differential", "Position", "rope self_extend"): RUNS,
    ("Mechanism", "forgetting", "Position", "deberta"): RUNS,
    ("Mechanism", "moba", "Position", "alibi"): RUNS,
    ("Mechanism", "performer", "Position", "alibi"): REFUSED,
    ("Mechanism", "delta", "Cache", "snapkv"): REFUSED,
    ("Depth", "exits", "Head", "classify"): REFUSED,
    ("Memory", "recurrent", "Position", "relation_labels"): REFUSED,
}
"""Pairs of the first member of a kind, as examples of what the nights try."""


@pytest.mark.parametrize(("names", "expected"), BY_DAY.items(), ids=str)
def test_a_pair_runs_or_is_refused(names: tuple[str, str, str, str], expected: str):
    members = [
        next(member for member in axes()[axis] if member.name == name)
        for axis, name in (names[:2], names[2:])
    ]
    assert attempt(*members) == expected


@nightly
@pytest.mark.parametrize(("axis", "other"), pairs())
def test_no_pair_of_two_axes_ends_in_another_error(axis: str, other: str):
    counts, raw = Counter[str](), []
    for first in axes()[axis]:
        for second in axes()[other]:
            try:
                counts[attempt(first, second)] += 1
            except Exception as error:
                place = traceback.extract_tb(error.__traceback__)[-1]
                raw.append(f"{first} with {second}: {type(error).__name__}: {error} ({place.name})")
    print(f"{axis} with {other}: {counts[RUNS]} run, {counts[REFUSED]} are refused")
    assert not raw, "\n".join(raw)
    assert counts[RUNS] + counts[REFUSED] == len(axes()[axis]) * len(axes()[other])
    assert counts[RUNS]
