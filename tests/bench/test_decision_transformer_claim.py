"""The claim of returns asked for: its verdict, a small run of the real thing, and that it goes on."""

import csv
import dataclasses
from pathlib import Path

import pytest

pytest.importorskip("minari")

from polyformer import InputError
from polyformer.bench.reproduce import decision_transformer
from polyformer.bench.reproduce.decision_transformer import (
    CLONING,
    METHODS,
    OURS,
    TENTH,
    DecisionTransformerClaim,
    Outcome,
    run,
    verdict,
)

PAPER = Outcome(
    100.0,
    {20.0: [30.0, 34.0], 100.0: [80.0, 84.0], 200.0: [180.0, 184.0]},
    {CLONING: [90.0, 110.0], TENTH: [170.0, 170.0]},
)


def test_an_outcome_is_measured_between_the_mean_and_what_is_asked_for():
    assert PAPER.correlation == pytest.approx(1)
    assert (PAPER.best, PAPER.way) == (182.0, pytest.approx(0.82))
    assert (PAPER.baseline(CLONING), PAPER.baseline(TENTH)) == (100.0, 170.0)


def test_returns_that_follow_are_a_reproduction():
    text = verdict({"CartPole-v1": [PAPER]}).text
    assert (
        "beyond the data's mean: reproduced\n  CartPole-v1: holds (rank correlation 1.00; asked for" in text
    )
    assert "asked for 200 achieves 182, data's mean 100, behaviour cloning 100, 10% cloning 170)" in text


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        (
            {"achieved": {20.0: [90.0], 100.0: [80.0], 200.0: [180.0]}},
            "what is achieved does not follow what is asked for (rank correlation 0.50",
        ),
        ({"achieved": {20.0: [30.0], 200.0: [140.0]}}, "the largest return is not achieved ("),
        ({"baselines": {CLONING: [182.0], TENTH: [0.0]}}, "behaviour cloning is as good ("),
    ],
)
def test_each_condition_can_fail(changes: dict, difference: str):
    other = dataclasses.replace(PAPER, **changes)
    text = verdict({"CartPole-v1": [other]}).text
    assert "the data's mean: not reproduced" in text
    assert f"CartPole-v1: {difference}" in text
    assert (
        "reproduced in 1 of 2 environments" in verdict({"CartPole-v1": [other], "Pendulum-v1": [PAPER]}).text
    )
    assert "mean: reproduced\n" in verdict({"CartPole-v1": [other, PAPER, PAPER]}).text, "medians over seeds"


def test_run_records_trains_tries_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    config = DecisionTransformerClaim(
        environments=("CartPole-v1",),
        seeds=(1,),
        recorded=6,
        points=2,
        episodes=2,
        steps=2,
        layers=1,
        width=16,
        out=str(tmp_path / "claim"),
    )
    outcomes = run(config)
    (outcome,) = outcomes["CartPole-v1"]
    assert len(outcome.achieved) == 2
    with (tmp_path / "claim" / "decision-transformer.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == ["data's mean", OURS, OURS, CLONING, TENTH]
    assert (tmp_path / "claim" / "decision-transformer.png").read_bytes().startswith(b"\x89PNG")
    assert "return follows the return asked for, beyond the data's mean: " in capsys.readouterr().out
    for method in METHODS:
        assert (
            tmp_path / "claim" / "CartPole-v1-1" / method.replace(" ", "-") / "model.safetensors"
        ).is_file()
    monkeypatch.setattr(decision_transformer, "record", lambda recording: pytest.fail("it recorded again"))
    assert run(config) == outcomes
    with pytest.raises(InputError, match="holds a run of other settings; choose another place with --out"):
        run(dataclasses.replace(config, width=32))
