"""Rules that cannot fail are refused, seeds that differ decide nothing, and records follow from figures."""

import dataclasses
from typing import Any

import pytest

from polyformer import InputError
from polyformer_lab.catalogue import Recorded
from polyformer_lab.results import Results
from polyformer_lab.rules import check_rules, find_faults
from polyformer_lab.study import Study


def study(*holds: str, scale: str = "three seeds", source: str = "Author 2017") -> Study:
    claim = {"claim": "a is better", "scale": scale, "source": source, "holds": list(holds)}
    return Study.from_dict(
        {"name": "own", "claims": {"own": claim}, "grid": {"arm": {"a": {}, "b": {}}}, "seeds": [0, 1, 2]}
    )


@pytest.mark.parametrize(
    "rule",
    [
        "1 < 2",
        "loss[a] <= loss[a]",
        "abs(loss[a] - loss[b]) >= 0",
        "loss[a] < loss[b] or loss[a] >= loss[b]",
        "max(loss[a], loss[b]) >= loss[a]",
        "high(loss[:]) >= low(loss[:])",
    ],
)
def test_a_rule_that_no_figures_contradict_is_refused(rule: str):
    with pytest.raises(InputError, match=r"claims.own.holds: .* is true for all figures"):
        check_rules(study(rule))


@pytest.mark.parametrize(
    "rule",
    [
        "loss[a] < loss[b]",
        "mean(loss[a] - loss[b]) < 0",
        "loss[a] <= 100 * loss[b]",
        "accuracy[a] >= 0.5",
        "mean(loss[a] - loss[b]) < std(loss[b])",
        "high(growth(loss[:])) <= 1.01",
        "abs(loss[a] / loss[b] - 1) < 0.5",
    ],
)
def test_other_rules_are_accepted(rule: str):
    check_rules(study(rule))


def rows(*pairs: tuple[float, float]) -> list[dict[str, Any]]:
    return [
        {"arm": arm, "seed": seed, "loss": loss}
        for seed, pair in enumerate(pairs)
        for arm, loss in zip("ab", pair)
    ]


@pytest.mark.parametrize("rule", ["loss[a] < loss[b]", "mean(loss[a] - loss[b]) < 0"])
@pytest.mark.parametrize(
    ("pairs", "outcome"),
    [
        ([(1, 2), (2, 3), (1, 5)], "reproduced"),
        ([(2, 1), (3, 2), (5, 1)], "not reproduced"),
        ([(1, 9), (2, 9), (3, 2)], "undecided"),
        ([(9, 1), (9, 2), (2, 3)], "undecided"),
    ],
)
def test_seeds_that_differ_decide_nothing(rule: str, pairs: list[tuple[float, float]], outcome: str):
    own = study(rule)
    verdict = Results(own, rows(*pairs)).verdict(own.claims["own"])
    assert verdict is not None
    assert verdict.outcome == outcome
    assert ("because the seeds differ: " in verdict.text) == (outcome == "undecided")


@pytest.mark.parametrize(
    ("pairs", "outcome"),
    [
        ([(1, 2), (2, 3), (1, 5)], "supported"),
        ([(2, 1), (3, 2), (5, 1)], "not supported"),
        ([(1, 9), (2, 9), (3, 2)], "undecided"),
    ],
)
def test_a_hypothesis_without_a_source_has_nothing_to_reproduce(
    pairs: list[tuple[float, float]], outcome: str
):
    own = study("loss[a] < loss[b]", source="")
    verdict = Results(own, rows(*pairs)).verdict(own.claims["own"])
    assert verdict is not None
    assert verdict.outcome == outcome
    assert "reproduced" not in verdict.text
    assert ("not supported with seed 2" in verdict.text) == (outcome == "undecided")


GOOD = Recorded("reproduced", 3, "2026-11-29", "1 and 2", "Own", "results.md")


@pytest.mark.parametrize(
    ("record", "changed", "fault"),
    [
        (GOOD, {}, None),
        (dataclasses.replace(GOOD, seeds=None), {}, None),
        (dataclasses.replace(GOOD, verdict="not reproduced"), {}, "the record says 'not reproduced'"),
        (dataclasses.replace(GOOD, seeds=2), {"scale": "two layers"}, "2 seeds, the figures are of 3"),
        (GOOD, {"scale": "two seeds"}, "the scale says 2 seeds, the record 3"),
        (GOOD, {"scale": "800 steps (seed 0: 250)"}, "the scale has runs of other lengths"),
    ],
)
def test_a_record_must_follow_from_its_figures(record: Recorded, changed: dict[str, str], fault: str | None):
    own = study("loss[a] < loss[b]", **changed)
    faults = list(find_faults(own, Results(own, rows((1, 2), (2, 3), (1, 5))), {"own": record}))
    assert (fault is None and faults == []) or (fault is not None and fault in faults[0])


def test_a_record_without_the_figures_of_its_rule_is_a_fault():
    own = study("loss[a] < loss[b]")
    only = [row for row in rows((1, 2), (2, 3), (1, 5)) if row["arm"] == "a"]
    assert list(find_faults(own, Results(own, only), {"own": GOOD})) == [
        "own: no verdict; loss[b] was not recorded"
    ]
