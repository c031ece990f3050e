"""Measurements of checkpoints, on tiny ones, against their definitions."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from polyformer import InputError, create_model
from polyformer.data import TokenizerConfig, build_tokenizer
from polyformer.data.tokenizers import load_tokenizer
from polyformer.models.checkpoints import from_pretrained
from polyformer_lab.cells import Cell, Row
from polyformer_lab.measures.attention import SPECIAL, received, separated, within
from polyformer_lab.measures.encoders import cut_out, documents_of, ranked, vectors
from polyformer_lab.measures.exits import at
from polyformer_lab.measures.long_texts import slowed

BOOK = "".join(f"Line {i} of the book, and all was quiet.\n" for i in range(200))


def checkpoint(folder: Path, preset: str, **options: Any) -> str:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "num_hidden_layers": 3}
    create_model(preset, vocab_size=260, **sizes, **options).save_pretrained(folder)
    build_tokenizer(TokenizerConfig(algorithm="bytes"), []).save(folder)
    return str(folder)


def text(folder: Path) -> str:
    (folder / "text.jsonl").write_text(json.dumps({"text": BOOK}))
    return str(folder / "text.jsonl")


def rows(folder: Path, kind: str, **options: Any) -> list[Row]:
    return Cell((), 0, folder / "cell", None, kind, options).run()


def test_attention_received_is_that_of_later_queries():
    weights = torch.tensor([[[1.0, 0, 0, 0], [1, 0, 0, 0], [0.5, 0.5, 0, 0], [0.3, 0.1, 0, 0.6]]])
    assert received(weights) == pytest.approx((0.4, 0.3, 1.0))


def test_trained_attention_is_measured_by_layer(tmp_path: Path):
    encoder, decoder = (checkpoint(tmp_path / kind, f"{kind}-tiny") for kind in ("encoder", "decoder"))
    sizes = {"text": text(tmp_path), "texts": 2, "length": 12}
    every, *layers = rows(tmp_path / "a", "singular-values", model=encoder, **sizes)
    shares = [row["share"] for row in layers]
    assert [row["layer"] for row in layers] == [1, 2, 3]
    assert every == pytest.approx({"share": sum(shares) / 3, "lower": shares[0], "upper": shares[2]})
    assert all(0.25 <= share <= 1 for share in shares)
    fresh, *_ = rows(tmp_path / "b", "singular-values", model=encoder, fresh=True, **sizes)
    assert fresh == every, "the checkpoint's weights were drawn from the same seed"
    assert len(rows(tmp_path / "c", "first-token", model=decoder, **sizes)) == 3
    with pytest.raises(InputError, match="model: expected an encoder"):
        rows(tmp_path / "d", "singular-values", model=decoder, **sizes)
    with pytest.raises(InputError, match="model: expected a decoder"):
        rows(tmp_path / "e", "first-token", model=encoder, **sizes)


def test_largest_keys_are_those_of_later_queries(tmp_path: Path):
    decoder = checkpoint(tmp_path / "decoder", "decoder-tiny")
    sizes = {"text": text(tmp_path), "texts": 2, "length": 12, "model": decoder}
    few, every = (rows(tmp_path / str(k), "largest-keys", keys=k, **sizes) for k in (3, 12))
    assert [row["layer"] for row in few] == [1, 2, 3]
    assert all(3 / 12 < row["share"] < 1 for row in few)
    assert [row["share"] for row in every] == pytest.approx([1, 1, 1])


def test_vectors_belong_to_the_nearer_mean_of_the_others():
    """With a vector of its own in the mean, each group of two would be told apart."""
    first, second = torch.tensor([[0.0], [1.0], [2.0]]), torch.tensor([[8.0], [9.0], [1.0]])
    assert separated(first, second) == pytest.approx(5 / 6)
    assert separated(first[:1].repeat(3, 1), first[:1].repeat(3, 1)) == 0, "equal vectors tell nothing"


def test_words_attend_within_their_sentence():
    """Weights on the token itself and on special tokens do not count."""
    sides = torch.tensor([SPECIAL, 0, 0, 1, 1])
    weights = torch.zeros(1, 5, 5)
    weights[0, :, 0] = 0.9
    weights[0, 1, 1], weights[0, 1, 2] = 0.06, 0.04
    weights[0, 2, 3], weights[0, 3, 4], weights[0, 4, 2] = 0.1, 0.1, 0.1
    assert within(weights, sides) == pytest.approx(2 / 4)


def test_senses_are_of_a_word_in_sentences(tmp_path: Path):
    encoder = checkpoint(tmp_path / "encoder", "encoder-tiny")
    (row,) = rows(
        tmp_path, "senses", model=encoder, word="fly", first=["a fly", "the fly"], second=["I fly", "we fly"]
    )
    assert row.keys() == {"accuracy", "same"}
    with pytest.raises(InputError, match="'a cat': the word or sentence is cut into other tokens there"):
        rows(tmp_path / "a", "senses", model=encoder, word="fly", first=["a cat"], second=["I fly"])


def test_a_text_is_read_in_pieces_by_longer_models(tmp_path: Path):
    folder = checkpoint(tmp_path / "model", "decoder-tiny", position="rope", max_position_embeddings=16)
    options = {"model": folder, "text": text(tmp_path), "lengths": [16, 64], "tokens": 64}
    known, short, long = rows(tmp_path / "dense", "pieces", **options)
    model = from_pretrained(folder).eval()
    ids = torch.tensor([load_tokenizer(folder).encode(BOOK)[:65]])
    losses = [model(ids[:, i : i + 16], shift_labels=ids[:, i + 1 : i + 17]).loss for i in range(0, 64, 16)]
    assert short["perplexity"] == pytest.approx(float(torch.stack(losses).detach().mean().exp()), rel=1e-5)
    assert known == {"known": short["perplexity"], "longest": long["perplexity"]}
    extended = [
        rows(tmp_path / name, "pieces", extension=name, **options)[0]["longest"]
        for name in ("yarn", "ntk", "interpolation")
    ]
    assert len({*extended, long["perplexity"]}) == 4
    narrow, *_ = rows(tmp_path / "window", "pieces", attention="Window(4)", **options)
    assert narrow["known"] != known["known"]
    sinks, *_ = rows(tmp_path / "sinks", "pieces", memory="sinks(first=1, length=20)", **options)
    assert sinks["known"] == known["known"]
    assert sinks["longest"] != known["longest"]
    assert slowed("yarn", 16, 64) == "yarn(factor=4.0, original_max_positions=16)"


def test_exits_by_confidence_are_compared_at_the_layers_of_fixed_ones(tmp_path: Path):
    assert at([(10, 0.5), (20, 0.9)], 15) == pytest.approx(0.7)
    assert at([(10, 0.5), (20, 0.9)], 9) is None
    options = {"text": text(tmp_path), "texts": 4, "prompt": 6, "new_tokens": 5, "thresholds": [0.9, 0.0]}
    folder = checkpoint(tmp_path / "exits", "decoder-tiny", depth="exits(rule=saturation)")
    compared, whole, _, lowest, first, second = rows(tmp_path, "exits", model=folder, **options)
    assert (whole["layers"], whole["consistency"]) == (3, 1.0)
    assert lowest["layers"] == first["layers"] == 1
    assert lowest["perplexity"] == pytest.approx(first["perplexity"])
    assert second["layers"] == 2
    middle = (lowest["consistency"] + whole["consistency"]) / 2
    lead = min(lowest["consistency"] - first["consistency"], middle - second["consistency"])
    assert compared == {"compared": 2, "lead": pytest.approx(lead)}
    plain = checkpoint(tmp_path / "plain", "decoder-tiny")
    with pytest.raises(InputError, match="no early exits"):
        rows(tmp_path / "none", "exits", model=plain, **options)
    with pytest.raises(InputError, match="data: expected 11000 tokens or more"):
        rows(tmp_path / "none", "exits", model=folder, **{**options, "texts": 1000, "text": text(tmp_path)})


def test_segments_without_a_store_are_read_alone(tmp_path: Path):
    folder = checkpoint(tmp_path / "model", "decoder-tiny", position="rope")
    memory = "memorizing(length=0, store=32, neighbours=4, sinks=1, trains=memory, layer=1)"
    options = {"model": folder, "text": text(tmp_path), "tokens": 40, "memory": memory}
    none, some = rows(tmp_path, "store-sizes", length=8, stores=[0, 32], **options)
    (whole,) = rows(tmp_path / "whole", "store-sizes", length=40, stores=[0], **options)
    model, tokenizer = from_pretrained(folder).eval(), load_tokenizer(folder)
    ids = torch.tensor([[tokenizer.bos_id, *tokenizer.encode(BOOK)[:40]]])
    with torch.no_grad():
        losses = [model(ids[:, i : i + 9], labels=ids[:, i : i + 9]).loss for i in range(0, 40, 8)]
        dense = model(ids, labels=ids).loss
    assert none["perplexity"] == pytest.approx(float(torch.stack(losses).mean().exp()), rel=1e-5)
    assert whole["perplexity"] == pytest.approx(float(dense.exp()), rel=1e-5)
    assert some["perplexity"] != none["perplexity"]
    saved = from_pretrained(tmp_path / "cell" / "model").state_dict()
    assert "decoder.memory.gate" in saved, "what a run begins with"


def test_passages_rank_documents_by_the_cosine():
    queries = torch.eye(3)
    documents = torch.tensor([[5.0, 0.0, 0.0], [3.0, 1.0, 2.0], [0.0, 1.0, 0.5]])  # query 1 finds 2 first
    # The cosines of query 2 are 0, 2 / sqrt(14), 0.5 / sqrt(1.25): document 2 comes second.
    expected = {"first": 1 / 3, "tenth": 1.0, "reciprocal": (1 + 1 / 2 + 1 / 2) / 3}
    assert ranked(queries, documents) == pytest.approx(expected)


def test_passages_are_not_in_their_documents():
    ids = [list(range(100)), list(range(200, 260))]
    taken, rest = cut_out(ids, 10, seed=0)
    for own, passage, others in zip(ids, taken, rest):
        assert passage == list(range(passage[0], passage[0] + 10))
        assert sorted(passage + others) == own
    assert cut_out(ids, 10, seed=0) == (taken, rest)
    assert cut_out(ids, 10, seed=1) != (taken, rest)


def test_a_document_is_cut_or_read_in_pieces(tmp_path: Path):
    folder = checkpoint(tmp_path / "model", "encoder-tiny", head="embed")
    model, tokenizer = from_pretrained(folder).eval(), load_tokenizer(folder)
    ids = list(range(3, 33))
    with torch.no_grad():
        framed = [[tokenizer.cls_id, *ids[i : i + 14], tokenizer.sep_id] for i in (0, 14, 28)]
        pieces = [model(torch.tensor([piece])).logits for piece in framed]
    whole = vectors(model, tokenizer, [ids], 16, whole=True)
    torch.testing.assert_close(whole, torch.cat(pieces).mean(0, keepdim=True))
    torch.testing.assert_close(vectors(model, tokenizer, [ids], 16), pieces[0])


def test_documents_are_chapters_or_reviews(tmp_path: Path):
    (tmp_path / "reviews.tsv").write_text("1\t8\tA fine film.\n0\t2\tDull.\n")
    assert documents_of(str(tmp_path / "reviews.tsv")) == ["A fine film.", "Dull."]
    chapters = [f"CHAPTER {n}\n\n" + f"The people of town {n} sat. " * 20 for n in ("I", "II", "IV.")]
    (tmp_path / "book.txt").write_text("A title\n" + "\n".join(chapters))
    folder = checkpoint(tmp_path / "model", "encoder-tiny", head="embed", max_position_embeddings=32)
    sizes = {"text": str(tmp_path / "book.txt"), "documents": 120, "passage": 8}
    (row,) = rows(tmp_path, "passages", model=folder, short=16, length=128, attention="Window(4)", **sizes)
    assert 1 / 3 <= row["reciprocal"] <= 1
    with pytest.raises(InputError, match="two documents or more of 20000 tokens, got 0"):
        rows(tmp_path / "none", "passages", model=folder, short=10_000, length=10_000, **sizes)
