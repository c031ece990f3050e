"""The claim of adaptive computation time: its verdict, and a small run of the real thing."""

import csv

import pytest

from polyformer.bench.reproduce.act import PUBLISHED, SLOW, ACTClaim, run, verdict
from polyformer.core.errors import InputError


def found(slow: list[float], published: list[float]) -> dict[tuple[str, int, int], tuple[float, float]]:
    """Of two seeds that differ by a tenth."""
    return {
        (start, seed, depth): (steps + seed / 10, 1.0)
        for start, curve in ((SLOW, slow), (PUBLISHED, published))
        for seed in (0, 1)
        for depth, steps in enumerate(curve, 1)
    }


def test_verdict_needs_more_steps_at_every_depth():
    good = verdict(found([2.0, 2.4, 3.0], [2.0, 2.0, 2.0])).text
    assert "more steps for what is harder: reproduced (steps from depth 1 to 3: 2.05, 2.45, 3.05" in good
    assert "stays where it began" in good
    assert (
        "differs from the paper: a deeper list gets fewer" in verdict(found([2.0, 3.0, 2.9], [2.0] * 3)).text
    )
    assert "differs from the paper: the deepest do not get more" in verdict(found([2.0, 2.1], [2.0] * 2)).text
    assert "differs by 1.00 steps" in verdict(found([2.0, 2.4, 3.0], [2.0, 2.0, 3.0])).text


def test_run_is_taken_up_again(tmp_path, capsys):
    config = ACTClaim(
        seeds=(0,),
        depth=2,
        rows=2,
        tested=3,
        steps=2,
        layers=3,
        width=16,
        heads=2,
        out=str(tmp_path / "claim"),
    )
    first = run(config)
    assert "more steps for what is harder: " in capsys.readouterr().out
    with (tmp_path / "claim" / "act.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(first) == 4
    assert (tmp_path / "claim" / "act.png").read_bytes().startswith(b"\x89PNG")
    assert run(config) == first


@pytest.mark.parametrize("wrong", [{"operators": ("MIN",)}, {"depth": 1}, {"seeds": ()}])
def test_wrong_settings_are_refused(wrong: dict[str, object]):
    with pytest.raises(InputError, match=next(iter(wrong))):
        ACTClaim(**wrong)
