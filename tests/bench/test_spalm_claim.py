"""The claim about SPALM in sizes that prove nothing: that it runs, goes on, and reads its figures right."""

import gzip
from pathlib import Path

import pytest

from polyformer.bench.reproduce.spalm import SpalmClaim, mixed_name, run, verdict

ARTICLE = " = Article {0} = \n \n The house of number {0} stands in street {1} . \n A river runs there . \n"


def test_the_claim_runs_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    data = tmp_path / "wikitext"
    data.mkdir()
    for name, count in (("train", 12), ("valid", 4), ("test", 4)):
        text = "".join(ARTICLE.format(number, number % 3) for number in range(count))
        (data / f"{name}.txt.gz").write_bytes(gzip.compress(text.encode()))
    sizes = {"steps": 3, "length": 8, "batch_tokens": 32, "layers": 1, "width": 16, "heads": 2}
    config = SpalmClaim(data=str(data), out=str(tmp_path / "out"), vocabulary=280, mixed=(2, 4), **sizes)
    results = run(config)
    assert results.keys() == {"Transformer-XL", "SPALM", mixed_name(2), mixed_name(4)}
    assert all(1 < value < 1000 for value in results.values())
    assert (tmp_path / "out" / "spalm.png").is_file()
    assert run(config) == results
    assert "training with neighbours lowers perplexity" in capsys.readouterr().out


def test_the_verdict_says_what_differs():
    config = SpalmClaim(data="", mixed=(4,))
    figures = {"Transformer-XL": 9.0, "SPALM": 7.0, mixed_name(4): 8.0}
    assert "reproduced" in verdict(config, figures).text
    assert "the mixture is as good (" in verdict(config, {**figures, mixed_name(4): 7.0}).text
    both = verdict(config, {**figures, "SPALM": 10.0}).text
    assert "differs from the paper: Transformer-XL alone is as good; the mixture is as good" in both
