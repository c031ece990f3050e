"""The claim about random features: its verdict, and a small run of the real thing."""

import csv

import pytest

from polyformer.bench.reproduce.random_features import CURVES, RandomFeaturesClaim, run, slope, verdict
from polyformer.core.errors import InputError


def curves(**errors: float) -> dict[str, list[tuple[int, float]]]:
    """Errors that fall as 1 / M from those given, 1 without a word."""
    start = {name: errors.get(name.replace(" ", "_"), 1.0) for name in CURVES}
    return {name: [(m, error / m) for m in (16, 64)] for name, error in start.items()}


GOOD = {
    "independent_positive": 0.4,
    "orthogonal_positive": 0.2,
    "orthogonal_trigonometric": 0.8,
    "orthogonal_gaussian": 0.5,
}


def test_verdict_needs_orthogonal_and_positive_features_to_err_less():
    assert ": reproduced (orthogonal positive features err 2.00 times less" in verdict(curves(**GOOD)).text
    for worse in ({"orthogonal_positive": 0.5}, {"orthogonal_trigonometric": 0.1}):
        assert ": not reproduced" in verdict(curves(**{**GOOD, **worse})).text
    assert slope(curves()["orthogonal positive"]) == pytest.approx(-1)


def test_run_writes_its_curves(tmp_path, capsys):
    results = run(RandomFeaturesClaim(length=24, width=4, draws=2, features=(4, 8), out=str(tmp_path / "rf")))
    assert results.keys() == CURVES.keys()
    with (tmp_path / "rf" / "random_features.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 2 * len(CURVES)
    assert (tmp_path / "rf" / "random_features.png").read_bytes().startswith(b"\x89PNG")
    assert "orthogonal positive features err least: " in capsys.readouterr().out


def test_one_number_of_features_is_no_curve():
    with pytest.raises(InputError, match="features: expected two numbers of 1 or more"):
        RandomFeaturesClaim(features=(8,))
