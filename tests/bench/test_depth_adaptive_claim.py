"""The claim about exits of translators in sizes that prove nothing: it runs, goes on, and judges right."""

import dataclasses
import gzip
from pathlib import Path

import pytest

from polyformer.bench.reproduce.depth_adaptive import (
    DepthAdaptiveClaim,
    Measured,
    Threshold,
    choose,
    each,
    pairs,
    recipe,
    run,
    verdict,
)
from polyformer.core.errors import InputError
from polyformer.data import DataConfig, load


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


def test_thresholds_for_each_exit_are_searched_from_that_of_all():
    config = DepthAdaptiveClaim(data="", thresholds=(0.9, 0.5, 0.1))

    def tried(threshold: Threshold) -> Measured:
        assert isinstance(threshold, tuple)
        first, second = threshold
        return Measured(30 - (first < 0.5) - (second < 0.5), 3 * first + 2 * second, 0)

    start = (0.5, 0.5)
    assert each(config, start, tried(start), tried, 29) == (0.1, 0.5)
    assert each(config, start, tried(start), tried, 28) == (0.1, 0.1)
    assert each(config, start, tried(start), tried, 29.5) == start
    assert each(dataclasses.replace(config, sweeps=0), start, tried(start), tried, 0) == start


def test_other_pairs_than_multi30k_are_named_by_their_files(tmp_path: Path):
    for name in ("a.src.en", "a.ref.vi", "tst.en", "tst.vi"):
        (tmp_path / name).write_text(f"{name}\n")
    files = {"train": "a.{src.en,ref.vi}", "validation": "tst.{en,vi}", "test": "tst.{en,vi}"}
    config = DepthAdaptiveClaim(data=str(tmp_path), **files)
    assert recipe(config)["data"]["path"] == str(tmp_path / "a.{src.en,ref.vi}")
    assert pairs(config, "train", 5) == (["a.src.en"], ["a.ref.vi"])
    assert pairs(config, "test", 5) == (["tst.en"], ["tst.vi"])


def test_no_more_pairs_are_read_than_asked_for(tmp_path: Path):
    for language in ("en", "de"):
        for name in ("train", "val", "test"):
            (tmp_path / f"{name}.{language}").write_text("".join(f"{language} {i}\n" for i in range(9)))
    files = {"train": "train.{en,de}", "validation": "val.{en,de}", "test": "test.{en,de}"}
    config = DepthAdaptiveClaim(data=str(tmp_path), rows=4, out=str(tmp_path / "out"), **files)
    splits = load(DataConfig.from_dict(recipe(config)["data"]), ("source", "target"))
    for rows in splits:
        assert [dict(row) for row in rows or ()] == [
            {"source": f"en {i}", "target": f"de {i}"} for i in range(4)
        ]


def test_the_verdict_needs_quality_and_few_layers():
    config = DepthAdaptiveClaim(data="")
    whole = {"whole": Measured(30, 6, 0)}
    assert verdict(config, {**whole, "threshold 0.5": Measured(29.8, 3, 0)}).text.startswith("reproduced")
    assert verdict(config, {**whole, "threshold 0.5": Measured(29.2, 3, 0)}).text.startswith("not")
    assert verdict(config, {**whole, "threshold 0.5": Measured(30, 5, 0)}).text.startswith("not")
    assert verdict(config, whole).text.startswith("not")
    own = {"threshold 0.5": Measured(30, 5, 0), "thresholds 0.5 0.4": Measured(30, 3, 0)}
    assert verdict(config, {**whole, **own}).text.startswith("not"), "the claim is of one threshold"


def test_without_data_it_says_which():
    with pytest.raises(InputError, match=r"data: .*Multi30k"):
        DepthAdaptiveClaim()
