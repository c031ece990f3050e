"""The errors of random features are those of their definition."""

from pathlib import Path

import pytest

from polyformer_lab.cells import Cell
from polyformer_lab.measures.approximations import feature_errors

SIZES = {"features": (16, 64), "length": 32, "width": 4, "draws": 4, "size": 0.5}


@pytest.mark.parametrize("name", ["positive", "trigonometric", "gaussian"])
def test_the_error_falls_with_the_number_of_features(name: str):
    cell = Cell((), 0, Path(), None, "feature-errors", {})
    few, many, mean = feature_errors(cell, map=name, orthogonal=False, **SIZES)
    assert 0 < many["error"] < few["error"] < 1
    assert mean == {"mean_error": pytest.approx((few["error"] * many["error"]) ** 0.5)}
