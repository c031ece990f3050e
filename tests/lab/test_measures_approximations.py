"""The errors of projected keys and values, and of random features, are those of their definitions."""

from pathlib import Path
from typing import Any

import pytest
import torch

from polyformer_lab.cells import Cell
from polyformer_lab.measures.approximations import Problem, feature_errors, projection_errors
from polyformer_lab.measures.time_and_memory import Call, compared, prepared


def errors(**changes: Any) -> dict[tuple[str, str, int], float]:
    options = {"vary": "k", "sizes": (4, 48), "n": 48, "k": 4, "width": 8, "common": 1.0, "draws": 4}
    rows = projection_errors(Cell((), 0, Path(), None, "", {}), **{**options, "fit_steps": 3, **changes})
    return {(row["approximation"], row["norm"], row["size"]): row["error"] for row in rows}


def test_errors_are_those_of_their_formulas():
    """Of the exact output no error, of zeros the whole output; SVD of full rank is exact."""
    problem = Problem.draw(48, 8, 1.0, 0)
    exact = torch.softmax(problem.scores, -1) @ problem.values
    assert problem.errors(exact) == (0.0, 0.0)
    assert problem.errors(torch.zeros_like(exact))[0] == pytest.approx(1.0)
    results = errors()
    assert results["svd", "output", 48] < 1e-12
    assert results["low_rank", "output", 48] > results["low_rank", "factors", 48] > 0.05


def test_random_projections_err_as_the_lemma_says():
    """(p R^T R w)'s variance is (|p|^2 |w|^2 + (p w)^2) / k: four times the rows, half the error."""
    results = errors(n=256, sizes=(16, 64), draws=30, fit_steps=0)
    assert results["low_rank", "output", 16] / results["low_rank", "output", 64] == pytest.approx(2, rel=0.15)


@pytest.mark.parametrize("level", ["attention", "layer"])
def test_unfused_and_fused_attention_are_the_same_function_and_linformer_another(level: str):
    outputs = {}
    for name, k in (("unfused", 0), ("sdpa", 0), ("k=8", 8)):
        outputs[name] = prepared(Call(level, name, 24, k, 2, 2, 4, "cpu"))()[0]  # type: ignore[index]
    torch.testing.assert_close(outputs["unfused"], outputs["sdpa"], rtol=1e-5, atol=1e-5)
    assert (outputs["k=8"] - outputs["sdpa"]).abs().max() > 1e-3


def test_only_what_both_measured_is_compared():
    seconds = {"unfused": 30.0, "sdpa": 10.0, "k=128": 15.0, "k=256": 25.0}
    assert compared(seconds, {"k=128": 1.5, "k=256": 1.3, "k=512": 2.0}) == {"compared": 2, "below": 1}
    del seconds["unfused"]
    assert compared(seconds, {"k=128": 1.5}) == {"compared": 0, "below": 0}


SIZES = {"features": (16, 64), "length": 32, "width": 4, "draws": 4, "size": 0.5}


@pytest.mark.parametrize("name", ["positive", "trigonometric", "gaussian"])
def test_the_error_falls_with_the_number_of_features(name: str):
    cell = Cell((), 0, Path(), None, "feature-errors", {})
    few, many, mean = feature_errors(cell, map=name, orthogonal=False, **SIZES)
    assert 0 < many["error"] < few["error"] < 1
    assert mean == {"mean_error": pytest.approx((few["error"] * many["error"]) ** 0.5)}
