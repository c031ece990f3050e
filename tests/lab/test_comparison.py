"""Standard errors and paired tests over seeds, against numbers by hand and by scipy."""

from typing import Any

import numpy as np
import pytest
from scipy.stats import permutation_test, ttest_rel

from polyformer_lab.comparison import (
    Difference,
    comparison_note,
    differences,
    sign_flip_p,
    smallest_p,
    standard_error,
)
from polyformer_lab.expression import evaluate
from polyformer_lab.results import Results, cell
from polyformer_lab.study import Study


def study(**changes: Any) -> Study:
    grid = {"arm": {"a": {}, "b": {}, "c": {}}, "rate": {"1e-3": {}, "3e-3": {}}}
    return Study.from_dict({"name": "own", "grid": grid, "seeds": [0, 1, 2], **changes})


def results(**losses: list[float]) -> Results:
    """Results at the rates 1e-3 and 3e-3; the latter has 10 more."""
    return Results(
        study(),
        [
            {
                "arm": arm,
                "rate": rate,
                "seed": seed,
                "loss": loss + more,
                "parameters": 7,
                "peak_resident_mib": loss,
            }
            for arm, own in losses.items()
            for rate, more in (("1e-3", 0.0), ("3e-3", 10.0))
            for seed, loss in enumerate(own)
        ],
    )


def difference(values: list[float]) -> Difference:
    return Difference("arm", "b", "a", "", "loss", np.array(values))


def test_the_standard_error_is_that_of_the_mean():
    assert standard_error([1.0, 2.0, 3.0, 6.0]) == pytest.approx((14 / 3 / 4) ** 0.5)
    assert standard_error([1.0]) is None
    assert cell([1.0, 2.0, 3.0, 6.0]) == "3 ± 1.1 (1 to 6)"
    assert cell([2.5]) == "2.5"
    assert (cell([4.0]), cell([3924295680.0]), cell([3924295680])) == ("4.0", "3.924e+09", "3924295680")
    assert evaluate(
        "error(x)", lambda *_: np.ones(1), {"x": np.array([1.0, 2.0, 3.0, 6.0])}
    ) == pytest.approx((14 / 3 / 4) ** 0.5)


def test_the_t_test_is_paired():
    a, b = np.array([3.1, 2.0, 5.2, 4.0]), np.array([2.9, 1.5, 5.0, 3.1])
    own = difference([*(a - b)]).t
    assert own is not None
    expected = ttest_rel(a, b)
    assert own == pytest.approx((expected.statistic, expected.pvalue))


@pytest.mark.parametrize(
    "values", [[0.5, 0.2, 0.9], [0.5, -0.2, 0.9, 0.1, -0.3], [1.0, 1.0, -1.0, 2.0, 3.0, 0.1]]
)
def test_signs_are_flipped_exactly(values: list[float]):
    expected = permutation_test(
        (np.array(values),), np.mean, permutation_type="samples", n_resamples=np.inf, alternative="two-sided"
    )
    assert sign_flip_p(np.array(values)) == pytest.approx(expected.pvalue)


def test_few_seeds_cannot_reach_the_level():
    assert sign_flip_p(np.array([1.0, 2.0, 3.0])) == 0.25
    assert smallest_p(3).startswith("three seeds cannot reach 0.05 with a sign-flip test")
    assert "0.0625" not in smallest_p(6)
    assert smallest_p(6) == "the smallest p of a sign-flip test with 6 seeds is 0.031"
    assert sign_flip_p(np.ones(17)) is None
    assert "three seeds cannot reach 0.05" in comparison_note(3)


@pytest.mark.parametrize(
    ("values", "outcome"),
    [
        ([0.50, 0.51, 0.49], "higher"),
        ([-0.50, -0.51, -0.49], "lower"),
        ([0.1, 0.9, 0.5], "undecided"),  # p = 0.16
        ([0.50, 0.51, -0.01], "undecided"),
        ([0.5], "undecided"),
        ([0.0, 0.0, 0.0], "equal"),
        ([0.25, 0.25, 0.25], "higher"),
    ],
)
def test_a_difference_within_the_spread_of_the_seeds_is_undecided(values: list[float], outcome: str):
    assert difference(values).outcome == outcome


def test_labels_are_compared_with_the_first_at_equal_other_labels():
    own = differences(results(a=[1.0, 2.0, 3.0], b=[2.0, 3.1, 4.0], c=[1.0, 1.0, 9.0]))
    assert [(each.axis, each.label, each.against, each.at) for each in own] == [
        ("arm", "b", "a", "1e-3"),
        ("arm", "b", "a", "3e-3"),
        ("arm", "c", "a", "1e-3"),
        ("arm", "c", "a", "3e-3"),
        ("rate", "3e-3", "1e-3", "a"),
        ("rate", "3e-3", "1e-3", "b"),
        ("rate", "3e-3", "1e-3", "c"),
    ]
    assert {each.metric for each in own} == {"loss"}, "the size is no random number"
    assert own[0].values == pytest.approx([1.0, 1.1, 1.0])
    assert own[0].line() == [
        *("arm", "b", "a", "1e-3", "loss", "+1.033 ± 0.033", "31", "0.001", "0.25", "higher")
    ]
    assert own[2].outcome == "undecided"


def test_nothing_is_compared_without_pairs_of_seeds():
    assert differences(Results(study(), [{"arm": "a", "rate": "1e-3", "seed": 0, "loss": 1.0}])) == []
    whole = results(a=[1.0, 2.0, 3.0], b=[2.0, 3.1, 4.0])
    rows = [row for row in whole.rows if (row["arm"], row["seed"]) != ("b", 2)]
    assert {each.axis for each in differences(Results(study(), rows))} == {"rate"}
