"""The claims on weights that serve twice: their rules, and a small run of the real thing."""

import csv
from pathlib import Path

import pytest

from polyformer import InputError
from polyformer.bench.experiment import DIFFERS, REPRODUCED, concluded
from polyformer.bench.reproduce.shared_weights import (
    SHARED,
    TIED,
    UNTIED,
    Ended,
    SharedWeightsClaim,
    run,
    sharing,
    tying,
)


def losses(
    untied: tuple[float, float], shared: tuple[float, float], part: int = 50
) -> dict[tuple[str, int], Ended]:
    results = {(TIED, seed): Ended(5.0, 300, 100) for seed in (0, 1)}
    results |= {(UNTIED, seed): Ended(loss, 400, 100) for seed, loss in enumerate(untied)}
    return results | {(SHARED, seed): Ended(loss, 250, part) for seed, loss in enumerate(shared)}


@pytest.mark.parametrize(
    ("untied", "outcome"), [((5.1, 5.01), REPRODUCED), ((5.5, 5.0), DIFFERS), ((5.5, 4.9), DIFFERS)]
)
def test_tying_must_be_lower_with_every_seed(untied: tuple[float, float], outcome: str):
    assert tying(losses(untied, (5.0, 5.0))).outcome == outcome


@pytest.mark.parametrize(
    ("shared", "part", "outcome"),
    [((5.15, 5.04), 50, REPRODUCED), ((5.15, 5.06), 50, DIFFERS), ((5.0, 5.0), 51, DIFFERS)],
)
def test_sharing_must_cost_little_and_save_half(shared: tuple[float, float], part: int, outcome: str):
    assert sharing(losses((5.1, 5.1), shared, part)).outcome == outcome


def test_a_run_trains_three_that_differ_in_what_they_share(tmp_path: Path):
    for name, articles in (("train", 30), ("valid", 4)):
        text = "".join(f" = Article {n} = \n\n some words of it , a few .\n\n" for n in range(articles))
        (tmp_path / f"{name}.txt").write_text(text)
    sizes = {"steps": 2, "layers": 2, "width": 16, "heads": 2, "vocabulary": 270, "length": 16}
    config = SharedWeightsClaim(data=str(tmp_path), seeds=(1,), batch_tokens=64, out=str(tmp_path), **sizes)
    results = run(config)
    assert results[TIED, 1].layers == results[UNTIED, 1].layers == 2 * results[SHARED, 1].layers
    tables = results[UNTIED, 1].parameters - results[TIED, 1].parameters
    assert tables == 270 * 16
    with (tmp_path / "shared-weights.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 3
    assert (tmp_path / "shared-weights.png").read_bytes().startswith(b"\x89PNG")
    assert run(config) == results, "what is finished is not trained again"
    record = concluded(tmp_path)
    assert record is not None
    assert list(record["verdicts"]) == ["weight-tying", "layer-sharing"]


def test_wrong_settings_are_refused():
    with pytest.raises(InputError, match="seeds: expected one or more"):
        SharedWeightsClaim(seeds=())
    with pytest.raises(InputError, match="layers"):
        SharedWeightsClaim(layers=1)
