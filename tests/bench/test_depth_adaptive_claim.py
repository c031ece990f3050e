"""The claim about exits of translators in sizes that prove nothing: it runs, goes on, and judges right."""

import gzip
from pathlib import Path

import pytest

from polyformer.bench.reproduce.depth_adaptive import (
    DepthAdaptiveClaim,
    Measured,
    choose,
    run,
    verdict,
)
from polyformer.core.errors import InputError


def test_the_claim_runs_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    data = tmp_path / "multi30k"
    data.mkdir()
    for name, count in (("train", 20), ("val", 3), ("test_2016_flickr", 3)):
        for language, text in (("en", "the dog number {} runs"), ("de", "der Hund Nummer {} läuft")):
            lines = "\n".join(text.format(number) for number in range(count)) + "\n"
            (data / f"{name}.{language}.gz").write_bytes(gzip.compress(lines.encode()))
    sizes = {"layers": 3, "width": 16, "heads": 2, "vocabulary": 270, "batch_tokens": 256, "steps": 2}
    config = DepthAdaptiveClaim(data=str(data), out=str(tmp_path / "out"), thresholds=(0.9, 0.0), **sizes)
    results = run(config)
    assert {"whole", "all after layer 1", "all after layer 2"} <= results.keys()
    assert results["whole"].layers == 3
    assert results["all after layer 2"].layers == 2
    assert (tmp_path / "out" / "depth-adaptive.png").is_file()
    again = run(config)
    assert {name: value.bleu for name, value in again.items()} == {
        name: value.bleu for name, value in results.items()
    }
    assert "reproduced" in capsys.readouterr().out


def test_the_threshold_of_the_fewest_layers_is_chosen_among_the_good():
    searched = {0.9: Measured(30, 5, 0), 0.5: Measured(29.9, 3, 0), 0.1: Measured(20, 1, 0)}
    assert choose(searched, 29.5) == 0.5
    assert choose(searched, 31) is None


def test_the_verdict_needs_quality_and_few_layers():
    config = DepthAdaptiveClaim(data="")
    whole = {"whole": Measured(30, 6, 0)}
    assert verdict(config, {**whole, "threshold 0.5": Measured(29.8, 3, 0)}).startswith("reproduced")
    assert verdict(config, {**whole, "threshold 0.5": Measured(29.2, 3, 0)}).startswith("not")
    assert verdict(config, {**whole, "threshold 0.5": Measured(30, 5, 0)}).startswith("not")
    assert verdict(config, whole).startswith("not")


def test_without_data_it_says_which():
    with pytest.raises(InputError, match=r"data: .*Multi30k"):
        DepthAdaptiveClaim()
