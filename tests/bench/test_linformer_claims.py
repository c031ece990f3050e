"""Linformer's claims: small runs of the real thing, the figures behind the verdicts, the verdicts."""

import csv
import math

import pytest
import torch

from polyformer.bench.experiment import REPRODUCED
from polyformer.bench.reproduce import linformer_quality as quality
from polyformer.bench.reproduce import linformer_speed as speed
from polyformer.bench.reproduce import linformer_theory as theory
from polyformer.core.errors import InputError
from polyformer.recipes import Recipe


def theory_config(**changes) -> theory.TheoryClaim:
    small = {"lengths": (32, 48), "length": 48, "ks": (4, 48), "k": 4, "width": 8, "draws": 4, "fit_steps": 3}
    return theory.TheoryClaim(**{**small, **changes})


def test_the_measured_errors_are_those_of_their_formulas():
    """Of nothing approximated no error, of nothing left the whole output; SVD of full rank is exact."""
    problem = theory.Problem.draw(theory_config(), 48)
    exact = torch.softmax(problem.scores, -1) @ problem.values
    assert problem.errors(exact) == (0.0, 0.0)
    assert problem.errors(torch.zeros_like(exact))[0] == pytest.approx(1.0)
    results = {
        (error.what, error.norm, error.k): error.value for error in theory.measure(theory_config(), 48, 48)
    }
    assert results["SVD", "output", 48] < 1e-12
    assert results["low-rank", "output", 48] > results["low-rank", "factors", 48] > 0.05


def test_random_projections_err_as_the_lemma_says():
    """(p R^T R w)'s variance is (|p|^2 |w|^2 + (p w)^2) / k: four times the rows, half the error."""
    config = theory_config(draws=30, length=256, fit_steps=0)
    error = {k: next(iter(theory.measure(config, 256, k))).value for k in (16, 64)}
    assert error[16] / error[64] == pytest.approx(2, rel=0.15)
    assert theory.bound(256, 64) == pytest.approx(math.sqrt(5 * math.log(256) / 64))


def test_theory_runs(tmp_path, capsys):
    results = theory.run(theory_config(out=str(tmp_path)))
    printed = capsys.readouterr().out
    assert "theorem 1, relative to |P| |w|, as in the lemma: " in printed
    assert "theorem 2, projected, fitted: " in printed
    with (tmp_path / "linformer_theory.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(results) == 2 * 2 * 4 + 4
    for name in ("k.png", "n.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def shot(who: str, k: int, value: float, peak: float | None = None) -> speed.Measured:
    return speed.Measured("attention", who, 512, k, 1, value, peak)


def test_speed_is_compared_with_table_3():
    assert (speed.published("time", 65536, 2048), speed.published("memory", 512, 128)) == (7.9, 1.7)
    assert speed.published("time", 512, 512) is None
    own = [shot("unfused", 0, 30.0, 8.0), shot("sdpa", 0, 10.0), shot("linformer", 128, 15.0, 2.0)]
    assert speed.ratios(own, "time", "unfused") == {(512, 128): 2.0}
    assert speed.ratios(own, "memory", "unfused") == {(512, 128): 4.0}
    assert "1 entries: reproduced" in speed.verdict(own).text
    slow = [*own, shot("linformer", 256, 25.0)]
    assert "not reproduced everywhere (n=512, k=256: 1.2x of 1.3x)" in speed.verdict(slow).text


@pytest.mark.parametrize("level", ["attention", "layer"])
def test_what_is_measured_is_what_it_says(level: str):
    """Unfused and fused attention are the same function, and Linformer another."""
    outputs = {}
    for who in ("unfused", "sdpa", "linformer"):
        shot = speed.Shot(level, who, 24, 8, 2, 2, 4, "cpu")
        y = speed.call(shot)()
        outputs[who] = y[0]  # type: ignore[index]
    torch.testing.assert_close(outputs["unfused"], outputs["sdpa"], rtol=1e-5, atol=1e-5)
    assert (outputs["linformer"] - outputs["sdpa"]).abs().max() > 1e-3


def test_dense_attention_stops_where_it_would_not_fit():
    config = speed.SpeedClaim(ks=(128, 512), fused_up_to=1024, unfused_limit=200)
    assert [shot.name for shot in speed.shots(config, "layer", 512)] == ["unfused", "sdpa", "k=128"]
    assert [shot.name for shot in speed.shots(config, "layer", 2048)] == ["k=128", "k=512"]
    assert speed.shots(config, "layer", 512)[0].rows == 8


def test_speed_runs(tmp_path, capsys):
    results = speed.run(
        speed.SpeedClaim(
            lengths=(16, 32), ks=(4,), tokens=32, heads=2, width=4, repeats=1, memory=False, out=str(tmp_path)
        )
    )
    assert len(results) == 2 * 2 * 3
    printed = capsys.readouterr().out
    assert "attention, time of unfused attention over Linformer's (| the paper's):" in printed
    assert "no verdict, nothing that the paper measured was measured" in printed
    assert (tmp_path / "layer.png").read_bytes().startswith(b"\x89PNG")


def quality_config(**changes) -> quality.QualityClaim:
    small = {
        "length": 16,
        "ks": (4, 8),
        "k": 8,
        "lengths": (8, 16),
        "steps": 2,
        "batch_tokens": 64,
        "layers": 1,
        "width": 16,
        "heads": 2,
        "vocabulary": 300,
    }
    return quality.QualityClaim(**{**small, **changes})


def test_quality_verdicts_compare_what_the_figure_compares():
    config = quality_config()
    results = {trial: 10.0 for part in quality.trials(config).values() for trial in part}
    assert [verdict and verdict.outcome for verdict in quality.verdicts(config, results)] == [REPRODUCED] * 3
    results[quality.Trial(16, 8)] = 11.0  # also the longest of part (c)
    printed = [verdict.text for verdict in quality.verdicts(config, results) if verdict is not None]
    assert "4 of 16" not in printed[0]
    assert "8 of 16 come near dense: not reproduced (k=4 x1.000, k=8 x1.100)" in printed[0]
    assert "one matrix for all layers is as good as none shared: reproduced" in printed[1]
    assert "k=8 serves longer inputs as well: not reproduced" in printed[2]


def test_the_trials_differ_in_attention_and_length_alone():
    config, dense = quality_config(), quality.Trial(16)
    first = Recipe.from_dict(quality.recipe(config, dense)).to_dict()
    for trial in (quality.Trial(16, 4), quality.Trial(16, 8, "layer")):
        other = Recipe.from_dict(quality.recipe(config, trial)).to_dict()
        mechanism = other["model"]["encoder"]["attention"].pop("mechanism")
        assert (mechanism["kind"], mechanism["k"]) == ("linformer", trial.k)
        other["model"]["encoder"]["attention"]["mechanism"] = {"kind": "softmax"}
        assert other == first


def test_quality_runs(tmp_path, capsys):
    config = quality_config(sharing=("head",), ks=(8,), lengths=(16,), out=str(tmp_path))
    results = quality.run(config)
    assert [trial.name for trial in results] == ["n16-dense", "n16-k8-head"]
    assert len({curve[-1] for curve in results.values()}) == 2
    assert "8 of 16 come near dense: " in capsys.readouterr().out
    assert (tmp_path / "sharing.png").read_bytes().startswith(b"\x89PNG")
    assert quality.run(config) == results, "a second call reads what is there"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: quality_config(lengths=(8,)), "lengths: expected 16, the length of the other runs"),
        (lambda: quality_config(ks=(9,)), "k: expected 1 to 8 rows, got 9"),
        (lambda: speed.SpeedClaim(levels=("model",)), "levels: expected 'attention', 'layer' or both"),
        (lambda: speed.SpeedClaim(ks=(0,)), "lengths, ks: expected 1 or more"),
        (lambda: theory_config(ks=()), "ks, lengths: expected 1 or more"),
    ],
)
def test_what_cannot_be_is_refused(make, message: str):
    with pytest.raises(InputError, match=message):
        make()
