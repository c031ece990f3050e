"""The claim about nearest neighbours, on a text that repeats itself, and the benchmark of their search."""

import gzip
from pathlib import Path

import pytest
import torch

from polyformer import create_model
from polyformer.bench import neighbours
from polyformer.bench.reproduce import knn_lm
from polyformer.data import TokenizerConfig, build_tokenizer

TEXT = "".join(f"{number} green bottles hang on the wall of house {number % 7}\n" for number in range(40))


def test_it_runs_and_says_what_it_finds(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    torch.manual_seed(0)
    options = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 260}
    create_model("decoder-tiny", num_hidden_layers=1, **options).save_pretrained(tmp_path / "model")
    build_tokenizer(TokenizerConfig(algorithm="bytes"), []).save(tmp_path / "model")
    for name, text in {"train": TEXT * 2, "valid": TEXT[200:700], "test": TEXT[900:1500]}.items():
        with gzip.open(tmp_path / f"{name}.txt.gz", "wt") as file:
            file.write(text)
    config = knn_lm.KnnClaim(
        model=str(tmp_path / "model"),
        data=str(tmp_path),
        out=str(tmp_path / "out"),
        characters=1500,
        length=32,
        tokens=256,
        neighbours=(2, 8),
    )
    result = knn_lm.run(config)
    assert result["flat"] < result["alone"] / 2
    said = capsys.readouterr().out
    assert "the test text: reproduced (k " in said
    assert "an index needs" in said  # for so few entries there is none
    table = (tmp_path / "out" / "knn_lm.csv").read_text().splitlines()
    assert len(table) == 1 + 4 * 2
    entries = {int(line.split(",")[0]) for line in table[1:]}
    assert max(entries) >= 1500
    assert (tmp_path / "out" / "knn_lm.png").exists()
    assert knn_lm.run(config) == result  # by the store that is there


def test_searches_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("faiss")
    sizes = {"entries": 10_000, "width": 8, "batch": 4, "neighbours": 20, "centres": 16, "rank": 4}
    config = neighbours.NeighboursBench(**sizes, repeats=1, out=str(tmp_path / "store"))
    taken = neighbours.run(config)
    assert set(taken) == {"read", "flat", "faiss, float32 in memory", "IVF-PQ", "recall"}
    assert taken["recall"] > 0.8
    assert "ms a query" in capsys.readouterr().out
