"""The warm-up claim: its verdict, and a small run of the real thing."""

import csv

import pytest

from polyformer.bench.reproduce.warmup import WarmupClaim, run, verdict


def losses(
    post_cold: float, post_warm: float, pre_cold: float, pre_warm: float
) -> dict[tuple[str, bool], float]:
    return {
        ("post", False): post_cold,
        ("post", True): post_warm,
        ("pre", False): pre_cold,
        ("pre", True): pre_warm,
    }


@pytest.mark.parametrize(
    ("final", "words"),
    [
        (losses(5.0, 3.0, 3.01, 3.0), ": reproduced (without warm-up the loss ends +2.000"),
        (losses(3.1, 3.0, 3.01, 3.0), ": not reproduced"),
        (losses(5.0, 3.0, 4.0, 3.0), ": not reproduced"),
    ],
)
def test_verdict_needs_post_norm_apart_and_pre_norm_alike(final: dict[tuple[str, bool], float], words: str):
    assert words in verdict(final).text


def test_run_trains_four_models_and_draws_their_curves(tmp_path, capsys):
    final = run(WarmupClaim(steps=2, layers=1, width=16, warmup=2, out=str(tmp_path / "claim")))
    assert len(set(final.values())) == 4, "four different runs"
    with (tmp_path / "claim" / "warmup.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["run"] for row in rows} == {
        f"{block}-norm, {warm} warm-up" for block in ("post", "pre") for warm in ("with", "no")
    }
    assert (tmp_path / "claim" / "warmup.png").read_bytes().startswith(b"\x89PNG")
    assert "needs warm-up, pre-norm does not: " in capsys.readouterr().out
