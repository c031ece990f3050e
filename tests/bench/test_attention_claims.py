"""The claims on what trained attention looks like, its rank and its sinks: rules, and small runs."""

from pathlib import Path

import pytest
import torch

from polyformer import InputError, create_model
from polyformer.bench.experiment import DIFFERS, REPRODUCED, UNSHOWN
from polyformer.bench.reproduce import low_rank, sinks
from polyformer.data import TokenizerConfig, build_tokenizer


def checkpoint(folder: Path, preset: str) -> str:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "num_hidden_layers": 3}
    create_model(preset, vocab_size=260, max_position_embeddings=64, **sizes).save_pretrained(folder)
    build_tokenizer(TokenizerConfig(algorithm="bytes"), []).save(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("trained", "fresh", "outcome", "words"),
    [
        ([0.9, 0.95], 0.8, REPRODUCED, "reproduced (the greatest quarter of singular values holds 0.925"),
        ([0.8, 0.95], 0.8, DIFFERS, "holds less than 0.9 ("),
        ([0.9, 0.95], 0.94, DIFFERS, "fresh weights are of as low a rank ("),
        ([0.95, 0.94], 0.8, DIFFERS, "upper layers are not of lower rank ("),
    ],
)
def test_rank_is_judged_by_three_figures(trained: list[float], fresh: float, outcome: str, words: str):
    judged = low_rank.verdict({low_rank.TRAINED: trained, "fresh weights, seed 0": [fresh, fresh]})
    assert judged.outcome == outcome
    assert words in judged.text


@pytest.mark.parametrize(
    ("first", "heads", "outcome"), [(0.3, 0.75, REPRODUCED), (0.29, 0.9, DIFFERS), (0.9, 0.7, DIFFERS)]
)
def test_sinks_are_judged_above_the_bottom(first: float, heads: float, outcome: str):
    bottom = [sinks.Layer(0.0, 1.0, 0.0)] * sinks.BOTTOM
    results = {
        sinks.TRAINED: [*bottom, sinks.Layer(first, 0.1, heads)],
        "fresh weights, seed 0": [*bottom] * 2,
    }
    assert sinks.verdict(results).outcome == outcome
    assert sinks.verdict({sinks.TRAINED: bottom}).outcome == UNSHOWN


def test_shares_are_those_of_later_queries():
    weights = torch.tensor([[[1.0, 0, 0, 0], [1, 0, 0, 0], [0.5, 0.5, 0, 0], [0.3, 0.1, 0, 0.6]]])
    assert sinks.shares(weights) == pytest.approx((0.4, 0.3, 1.0))


def test_a_run_of_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "book.txt").write_text("Once there was a river, and it ran on.\n" * 400)
    sizes = {"data": str(tmp_path / "book.txt"), "texts": 2, "length": 12, "seeds": (0,)}
    encoder, decoder = (checkpoint(tmp_path / kind, f"{kind}-tiny") for kind in ("encoder", "decoder"))
    ranks = low_rank.run(low_rank.LowRankClaim(model=encoder, out=str(tmp_path / "rank"), **sizes))
    assert {len(row) for row in ranks.values()} == {3}
    assert all(0.25 <= share <= 1 for row in ranks.values() for share in row)
    found_sinks = sinks.run(sinks.SinksClaim(model=decoder, out=str(tmp_path / "sinks"), **sizes))
    assert {len(row) for row in found_sinks.values()} == {3}
    for place in ("rank/low-rank", "sinks/sinks"):
        assert (tmp_path / f"{place}.png").read_bytes().startswith(b"\x89PNG")
        assert (tmp_path / f"{place}.csv").is_file()
    said = capsys.readouterr().out
    assert "trained attention is of low rank: " in said
    assert "attention rests on the first token: " in said
    with pytest.raises(InputError, match="model: expected an encoder"):
        low_rank.run(low_rank.LowRankClaim(model=decoder, out=str(tmp_path / "no"), **sizes))
    with pytest.raises(InputError, match="model: expected a decoder"):
        sinks.run(sinks.SinksClaim(model=encoder, out=str(tmp_path / "no"), **sizes))
    with pytest.raises(InputError, match="data: expected 10000 tokens or more"):
        low_rank.run(low_rank.LowRankClaim(model=encoder, **{**sizes, "texts": 1000, "length": 10}))
