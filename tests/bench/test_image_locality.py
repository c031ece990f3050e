"""The image claim: its verdict, the keys it counts, and a small run of the real thing."""

import csv

import pytest

from polyformer.bench.reproduce.image_locality import Outcome, seen, verdict
from polyformer.cli import main
from polyformer.patterns import Full, Local1D, Local2D


@pytest.mark.parametrize(
    ("bits", "words"),
    [
        ((2.0, 2.02, 1.9), ": reproduced (bits a pixel against dense: local 1D +0.020, local 2D -0.100)"),
        ((2.0, 2.0, 2.05), ": not reproduced"),
    ],
)
def test_verdict_needs_both_local_ones_near_dense(bits: tuple[float, ...], words: str):
    outcomes = {
        name: Outcome(1, 1, test_bits, 1) for name, test_bits in zip(("dense", "local 1D", "local 2D"), bits)
    }
    assert words in verdict(outcomes).text


def test_keys_are_counted_as_a_decoder_sees_them():
    assert seen(Full(), 12) == 6.5
    assert seen(Local1D(4, 0), 12) == 2.5
    assert seen(Local2D((3, 4), (3, 4), (0, 0, 0)), 12) == 6.5


def test_run_trains_three_models_by_the_name_with_a_hyphen(tmp_path, capsys):
    out = tmp_path / "claim"
    words = ["reproduce", "image-locality", "--steps", "1", "--images", "4", "--layers", "1", "--width", "16"]
    assert main([*words, "--out", str(out)]) == 0
    with (out / "image_locality.csv").open() as file:
        rows = {row["attention"]: row for row in csv.DictReader(file)}
    assert set(rows) == {"dense", "local 1D", "local 2D"}
    assert len({row["test"] for row in rows.values()}) == 3, "three different models"
    assert float(rows["local 2D"]["keys"]) < float(rows["dense"]["keys"]) == 32.5
    assert (out / "images.png").read_bytes().startswith(b"\x89PNG")
    assert "a pixel is predicted from those around it: " in capsys.readouterr().out
    assert main(["reproduce", "image-locale"]) == 2
    assert "did you mean 'image-locality'" in capsys.readouterr().err
