"""GTrXL's claims: their verdicts, policies of equal size, and a small run of the real thing."""

import csv
import warnings
from pathlib import Path

import pytest
import torch

from polyformer import InputError
from polyformer.model import Policy
from polyformer.presets import create_model

pytest.importorskip("popgym")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchrl.collectors")
from polyformer.agents.episode import played_episode
from polyformer.bench.reproduce.gtrxl import (
    POLICIES,
    Curves,
    GTrXLClaim,
    median,
    parameters,
    policy_options,
    run,
    verdicts,
)
from polyformer.environments.making import make_environment

RATES = 0.1, 0.2


def curves(**last: tuple[float, ...]):
    """For each policy three seeds at one rate, then three at another."""
    return {
        (name, rate): [[(10, -0.5), (20, value)] for value in values[3 * i : 3 * i + 3]]
        for name, values in last.items()
        for i, rate in enumerate(RATES)
    }


PAPER = {
    "gtrxl": (0.9, 0.8, -0.5, 0.7, 0.6, 0.9),
    "transformer-xl": (0.9, 0.9, 0.9, -0.5, 0.9, -0.4),
    "feedforward": (-0.5, -0.4, -0.5, 0.9, 0.1, 0.1),
}


def said(measured: Curves) -> list[str]:
    return [verdict.text for verdict in verdicts(measured, 0.5) if verdict is not None]


def test_medians_decide():
    lines = said(curves(**PAPER))
    figures = "(at its worst rate 0.700, a plain Transformer-XL -0.400)"
    assert lines[0].endswith(f"plain Transformer-XL fails: reproduced {figures}")
    figures = "(at its best rate 0.800, feed-forward layers 0.100)"
    assert lines[1].endswith(f"without a memory cannot: reproduced {figures}")
    assert median(curves(**PAPER)["gtrxl", 0.1]) == [(10, -0.5), (20, 0.8)]


@pytest.mark.parametrize(
    ("name", "values", "line", "difference"),
    [
        ("transformer-xl", (0.6, 0.5, 0.1, 0.6, 0.5, 0.1), 0, "the other does ("),
        ("feedforward", (0.6, 0.5, 0.1, -0.5, -0.5, -0.5), 1, "feed-forward layers reach it ("),
        ("gtrxl", (0.9, 0.4, 0.4, 0.9, 0.9, 0.9), 0, "GTrXL does not reach 0.5 at every rate ("),
        ("gtrxl", (0.9, 0.4, 0.4, 0.9, 0.4, 0.4), 1, "GTrXL does not reach 0.5 ("),
    ],
)
def test_every_difference_is_named(name: str, values: tuple[float, ...], line: int, difference: str):
    text = said(curves(**{**PAPER, name: values}))[line]
    assert f"differs from the paper: {difference}" in text


def test_without_a_policy_there_is_no_verdict():
    assert said(curves(lstm=PAPER["gtrxl"])) == ["no verdict: it needs GTrXL"] * 2
    assert verdicts(curves(gtrxl=PAPER["gtrxl"]), 0.5) == [None, None]


def test_policies_have_as_many_parameters():
    config = GTrXLClaim(layers=3, width=16)
    goal = parameters(config, "gtrxl", 16)
    for name in POLICIES[1:]:
        width = policy_options(config, name)["hidden_size"]
        nearest = [abs(parameters(config, name, width + change) - goal) for change in (-2, 0, 2)]
        assert min(nearest) == nearest[1]
        assert nearest[1] < goal / 10


def test_a_small_run_writes_its_curves_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = GTrXLClaim(
        policies=("gtrxl", "feedforward"),
        **{
            "layers": 1,
            "width": 4,
            "memory": 3,
            "steps": 2,
            "evaluations": 1,
            "seeds": (0,),
            "rates": (0.002,),
        },
        out=str(tmp_path),
    )
    measured = run(config)
    assert capsys.readouterr().out.count("differs from the paper: GTrXL does not reach 0.5 (") == 1
    with (tmp_path / "gtrxl.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["policy"], row["rate"], row["steps"]) for row in rows] == [
        ("gtrxl", "0.002", "416"),
        ("feedforward", "0.002", "416"),
    ]
    assert (tmp_path / "gtrxl.png").stat().st_size > 1000
    assert (tmp_path / "episode.png").stat().st_size > 1000
    assert run(config) == measured


def test_the_weights_of_an_episode_are_those_of_its_steps():
    policy = create_model("gtrxl", hidden_size=8, memory_length=5, intermediate_size=8)
    assert isinstance(policy, Policy)
    environment = make_environment("popgym:popgym-RepeatPreviousEasy-v0")
    episode = played_episode(policy, environment, 0, 9)
    weights, rewards = episode.weights.mean(1), episode.rewards
    assert episode.weights.shape == (1, 2, 9, 1 + 5)
    assert len(rewards) == 9
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 9))
    assert not weights[0, 2, 3:].any()  # before the first step there was none
    assert weights[0, 2, :3].all()
    alone = create_model("policy-feedforward", hidden_size=8)
    assert isinstance(alone, Policy)
    with pytest.raises(InputError, match="attends to nothing"):
        played_episode(alone, environment, 0, 9)


def test_an_unknown_policy_is_refused():
    with pytest.raises(InputError, match=r"policies.*'gtrlx'.*gtrxl"):
        GTrXLClaim(policies=("gtrlx",))
