"""The claim on batch normalisation: its rule, and a small run of the real thing."""

import csv

import pytest

from polyformer.bench.reproduce.batch_norm import BatchNormClaim, Ended, run, verdict
from polyformer.core.errors import InputError


@pytest.mark.parametrize(
    ("behind", "words"),
    [
        ((0.04, 0.1), ": reproduced (its validation loss ends +0.070 nats"),
        ((0.04, 0.05), ": not reproduced"),
        ((-0.01, 0.5), ": not reproduced"),
        ((-0.3, -0.5), ": not reproduced (its validation loss ends -0.400 nats"),
    ],
)
def test_every_seed_must_be_worse_and_the_mean_clearly(behind: tuple[float, ...], words: str):
    results = {("layer", seed): Ended(3.0, 4.0) for seed in range(len(behind))}
    results |= {("batch", seed): Ended(2.9, 4.0 + more) for seed, more in enumerate(behind)}
    assert words in verdict(results).text
    assert "on training batches -0.100" in verdict(results).text


def test_run_trains_pairs_that_differ_in_the_norm_alone(tmp_path, capsys):
    config = BatchNormClaim(
        seeds=(0, 1), steps=2, layers=1, width=16, heads=2, vocabulary=300, out=str(tmp_path / "claim")
    )
    results = run(config)
    assert results.keys() == {(norm, seed) for norm in ("layer", "batch") for seed in (0, 1)}
    assert len({ended.validation for ended in results.values()}) == 4, "four different runs"
    with (tmp_path / "claim" / "batch_norm.csv").open() as file:
        assert [row["norm"] for row in csv.DictReader(file)] == ["layer", "batch"] * 2
    assert (tmp_path / "claim" / "batch_norm.png").read_bytes().startswith(b"\x89PNG")
    assert "batch normalisation trains worse on text" in capsys.readouterr().out
    assert run(config) == results, "a second call reads what is there"


def test_seeds_are_checked():
    with pytest.raises(InputError, match="seeds: expected one or more"):
        BatchNormClaim(seeds=())
