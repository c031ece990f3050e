"""Classifiers of long reviews: which reviews are chosen, the rule, and a small run of the real thing."""

import csv
from pathlib import Path

import pytest
import torch

from polyformer import InputError, create_model, from_pretrained
from polyformer.bench.reproduce.long_reviews import LongReviewsClaim, Outcome, chosen, run, verdict
from polyformer.data import TokenizerConfig, build_tokenizer

WORDS = ["good", "bad", "film", "plot", "scene"]


@pytest.fixture
def claim(tmp_path: Path) -> LongReviewsClaim:
    """A tiny encoder, and six reviews a split of which four are long."""
    torch.manual_seed(0)
    folder = tmp_path / "model"
    create_model("encoder-tiny", vocab_size=200, max_position_embeddings=16).save_pretrained(folder)
    lines = [
        f"{i % 2}\t{i}\t{' '.join(WORDS[(i + j) % 5] for j in range(3 if i < 2 else 30))}" for i in range(6)
    ]
    build_tokenizer(TokenizerConfig(algorithm="wordpiece", vocab_size=200), lines).save(folder)
    for split in ("train", "test"):
        (tmp_path / f"{split}.tsv").write_text("\n".join([*lines, ""]))
    sizes = {"shortest": 20, "short": 16, "long": 64, "texts": 4, "tests": 2, "batch": 2, "epochs": 1}
    return LongReviewsClaim(
        model=str(folder),
        data=str(tmp_path),
        attentions=("Window(4) | Global(1)",),
        out=str(tmp_path / "out"),
        seeds=(0, 1),
        **sizes,
    )


def test_only_long_reviews_are_chosen(claim: LongReviewsClaim, tmp_path: Path):
    files = chosen(claim, tmp_path / "chosen")
    with Path(files["path"]).open() as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    assert [row["label"] for row in rows] == ["0", "1", "0", "1"]
    assert all(len(row["text"].split()) == 30 for row in rows)
    assert files["mean_length"] == 30  # every word is a token
    with pytest.raises(InputError, match="tests: expected at most the 4 reviews of 20 tokens or more, got 5"):
        chosen(LongReviewsClaim.from_dict({**claim.to_dict(), "tests": 5}), tmp_path / "chosen")


@pytest.mark.parametrize(("whole", "said"), [(0.86, "reproduced"), (0.81, "not reproduced")])
def test_a_gain_is_more_than_the_error_of_the_tests(claim: LongReviewsClaim, whole: float, said: str):
    sizes = LongReviewsClaim.from_dict({**claim.to_dict(), "tests": 400})  # of which 80 % leave 2 points
    results = {
        "cut at 16": Outcome({0: 0.78, 1: 0.82}, 1.0),
        "Window(4) | Global(1)": Outcome({0: whole, 1: whole}, 1.0),
    }
    assert f"beyond the cut: {said} (" in verdict(sizes, results).text


def test_a_run_fine_tunes_all_and_is_taken_up(claim: LongReviewsClaim, capsys: pytest.CaptureFixture[str]):
    results = run(claim)
    assert list(results) == ["cut at 16", "Window(4) | Global(1)"]
    assert all(sorted(row.accuracy) == [0, 1] for row in results.values())
    output = capsys.readouterr().out
    assert "4 of 4 texts are cut to 16 tokens" in output
    assert output.count("texts are cut") == 2  # not for the two runs that read all
    longer = from_pretrained(Path(claim.out) / "run-1-0")
    assert longer.config.max_position_embeddings == 64
    assert {name: row.accuracy for name, row in run(claim).items()} == {
        name: row.accuracy for name, row in results.items()
    }
