"""Passages that look for their documents: ranks, pieces, verdicts, and a small run of the real thing."""

import csv
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from polyformer import InputError, create_model
from polyformer.bench.reproduce.long_documents import (
    LongDocumentsClaim,
    Ranking,
    cut_out,
    ranked,
    run,
    texts_of,
    vectors,
    verdict,
)
from polyformer.data import TokenizerConfig, build_tokenizer

SIZES = LongDocumentsClaim(model="m", data="d", short=16, long=64, attentions=("Window(4)",))


def test_ranks_are_those_of_the_cosine():
    queries = torch.eye(3)
    documents = torch.tensor([[5.0, 0.0, 0.0], [3.0, 1.0, 2.0], [0.0, 1.0, 0.5]])  # query 1 finds 2 first
    result = ranked(queries, documents, 1.5)
    # of query 2 the cosines are 0, 2 / sqrt(14), 0.5 / sqrt(1.25): document 2 comes second
    assert (result.first, result.tenth) == (pytest.approx(1 / 3), 1.0)
    assert result.reciprocal == pytest.approx((1 + 1 / 2 + 1 / 2) / 3)


def test_passages_are_not_in_their_documents():
    rows = [list(range(100)), list(range(200, 260))]
    passages, rest = cut_out(rows, 10, seed=0)
    for ids, passage, others in zip(rows, passages, rest):
        assert passage == list(range(passage[0], passage[0] + 10))
        assert sorted(passage + others) == ids
    assert cut_out(rows, 10, seed=0) == (passages, rest)
    assert cut_out(rows, 10, seed=1) != (passages, rest)


def test_a_text_is_cut_or_read_in_pieces():
    torch.manual_seed(0)
    model = create_model("encoder-tiny", head="embed", vocab_size=40).eval()
    ids = list(range(3, 33))
    with torch.no_grad():
        pieces = [model(torch.tensor([[1, *ids[i : i + 14], 2]])).logits for i in (0, 14, 28)]
    whole = vectors(model, [ids], ([1], [2]), 16, whole=True)
    torch.testing.assert_close(whole, torch.cat(pieces).mean(0, keepdim=True))
    torch.testing.assert_close(vectors(model, [ids], ([1], [2]), 16), pieces[0])
    assert not torch.allclose(F.normalize(whole, dim=-1), pieces[0], atol=1e-3)


@pytest.mark.parametrize(
    ("sparse", "said"),
    [(0.39, "reproduced"), (0.37, "differs from the paper"), (0.19, "differs from the paper")],
)
def test_the_rule(sparse: float, said: str):
    rows = {"cut at 16": 0.2, "mean of pieces of 16": 0.5, "dense, 64": 0.4, "Window(4), 64": sparse}
    results = {name: Ranking(0.0, 0.0, value, 1.0) for name, value in rows.items()}
    assert f"is read: {said} (" in verdict(SIZES, results).text


def test_a_run_ranks_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    torch.manual_seed(0)
    create_model("encoder-tiny", head="embed", vocab_size=300, max_position_embeddings=32).save_pretrained(
        tmp_path / "model"
    )
    chapters = [
        f"CHAPTER {n}\n\n" + f"The people of town {n} sat by the river. " * 8 for n in ("I", "II", "IV.")
    ]
    (tmp_path / "book.txt").write_text("A title\n" + "\n".join(chapters))
    tokenizer = build_tokenizer(TokenizerConfig(algorithm="wordpiece", vocab_size=300), chapters)
    tokenizer.save(tmp_path / "model")
    claim = LongDocumentsClaim(
        model=str(tmp_path / "model"),
        data=str(tmp_path / "book.txt"),
        short=16,
        long=128,
        passage=8,
        attentions=("Window(4)",),
        out=str(tmp_path / "out"),
    )
    results = run(claim)
    assert "3 documents of" in capsys.readouterr().out
    assert list(results) == ["cut at 16", "mean of pieces of 16", "dense, 128", "Window(4), 128"]
    with (tmp_path / "out" / "long-documents.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["reciprocal"]) for row in rows] == [ranking.reciprocal for ranking in results.values()]
    with pytest.raises(InputError, match="two documents or more of 20000 tokens, got 0"):
        run(LongDocumentsClaim(model=claim.model, data=claim.data, short=10_000, long=10_000))


def test_documents_are_chapters_or_reviews(tmp_path: Path):
    (tmp_path / "reviews.tsv").write_text("1\t8\tA fine film.\n0\t2\tDull.\n")
    reviews = LongDocumentsClaim(model="m", data=str(tmp_path / "reviews.tsv"))
    assert texts_of(reviews) == ["A fine film.", "Dull."]
    with pytest.raises(InputError, match=r"data: absent: no such file; expected a book or a \.tsv"):
        texts_of(LongDocumentsClaim(model="m", data="absent"))
