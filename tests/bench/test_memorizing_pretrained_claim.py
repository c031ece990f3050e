"""The claims of a store that a trained model is given: verdict, and a small run of the real thing."""

import csv
import dataclasses
from pathlib import Path

import pytest
import torch

from polyformer import InputError, create_model
from polyformer.bench.experiment import DIFFERS
from polyformer.bench.reproduce.memorizing_pretrained import (
    CONVERTED,
    DENSE,
    TUNED,
    WITHOUT,
    PretrainedClaim,
    perplexity,
    run,
    verdicts,
)
from polyformer.data import TokenizerConfig, build_tokenizer
from polyformer.model import Transformer

PAPER = {
    TUNED: {0: 20.2, 8: 19.0, 64: 18.0, 256: 17.9},
    CONVERTED: {64: 19.9},
    WITHOUT: {0: 20.0},
    DENSE: {0: 17.0},
}
SIZES = PretrainedClaim(model="m", store=64, stores=(0, 8, 64, 256))


def test_a_store_that_closes_half_of_the_gap_is_a_reproduction():
    larger, closes = (verdict.text for verdict in verdicts(SIZES, PAPER))
    assert (
        "perplexity: reproduced (20.20 with none, 18.00 with 64 entries, best 17.90; without 20.0" in larger
    )
    assert "of 2048: reproduced (67% of it: 20.00 without, 18.00 with 64 entries, dense 17.00)" in closes


@pytest.mark.parametrize(
    ("name", "changes", "difference"),
    [
        (TUNED, {8: 20.5}, "differs from the paper: perplexity rises as the store grows ("),
        (TUNED, {0: 18.0, 8: 18.0}, "it does not fall"),
        (WITHOUT, {0: 17.95}, "the model without is as good"),
        (TUNED, {64: 18.6}, "of 2048: differs from the paper (47% of it"),
        (DENSE, {0: 20.0}, "of 2048: differs from the paper (nan% of it"),
    ],
)
def test_every_difference_is_named(name: str, changes: dict[int, float], difference: str):
    judged = verdicts(SIZES, {**PAPER, name: {**PAPER[name], **changes}})
    assert [verdict.outcome for verdict in judged if difference in verdict.text] == [DIFFERS]


@pytest.fixture
def claim(tmp_path: Path) -> PretrainedClaim:
    """Of a tiny checkpoint, made here."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 260}
    create_model("decoder-tiny", num_hidden_layers=3, position="rope", **sizes).save_pretrained(
        tmp_path / "model"
    )
    build_tokenizer(TokenizerConfig(algorithm="bytes"), []).save(tmp_path / "model")
    book = tmp_path / "book.txt"
    book.write_text("".join(f"Line {i} of the book, and all was quiet.\n" for i in range(400)))
    return PretrainedClaim(
        model=str(tmp_path / "model"),
        data=str(book),
        layer=1,
        length=16,
        dense=64,
        store=32,
        neighbours=4,
        stores=(0, 32, 128),
        held_out=100,
        steps=4,
        lr=1e-2,
        out=str(tmp_path / "claim"),
    )


def weights(folder: str | Path) -> dict[str, torch.Tensor]:
    return Transformer.from_pretrained(folder).state_dict()


@pytest.mark.parametrize("trains", ["memory", "layer", "above"])
def test_a_run_trains_what_it_says_and_goes_on(
    claim: PretrainedClaim, trains: str, capsys: pytest.CaptureFixture[str]
):
    claim, out = dataclasses.replace(claim, trains=trains), Path(claim.out)
    first = run(claim)
    begun, tuned = weights(out / "converted"), weights(out / "tuned")
    changed = {name for name, x in begun.items() if not torch.equal(x, tuned[name])}
    layers = {name.split(".")[2] for name in changed if name.startswith("decoder.layers.")}
    assert layers == {"memory": set(), "layer": {"1"}, "above": {"1", "2"}}[trains]
    assert {"decoder.memory.gate", "decoder.memory.temperature"} <= changed
    assert not {"tokens.weight", "decoder.final_norm.weight"} & changed
    assert first[TUNED][0] != first[TUNED][32] != first[TUNED][128]
    assert (first[WITHOUT][0] == first[TUNED][0]) == (trains == "memory"), "the same weights, or others"
    assert first[DENSE][0] != first[WITHOUT][0]
    with (out / "memorizing.csv").open() as file:
        rows = list(csv.DictReader(file))
    values = {(row["decoder"], int(row["store"])): float(row["perplexity"]) for row in rows}
    assert values == {(name, size): x for name, sizes in first.items() for size, x in sizes.items()}
    assert (out / "memorizing.png").read_bytes().startswith(b"\x89PNG")
    assert run(claim) == first, "what is finished is neither trained nor measured again"
    assert "a larger store lowers perplexity" in capsys.readouterr().out
    with pytest.raises(InputError, match=r"figures.json holds figures of other settings; choose another"):
        run(dataclasses.replace(claim, held_out=90))


def test_segments_without_a_store_are_read_one_by_one(claim: PretrainedClaim):
    """And one segment of the whole text is the plain model."""
    model = Transformer.from_pretrained(claim.model)
    ids = torch.randint(260, (1, 41))
    with torch.no_grad():
        losses = [model(ids[:, i : i + 9], labels=ids[:, i : i + 9]).loss for i in range(0, 40, 8)]
        whole = model(ids, labels=ids).loss
    run(dataclasses.replace(claim, trains="memory"))
    stored = Transformer.from_pretrained(Path(claim.out) / "converted")
    stored.decoder.memory.size = 0
    assert perplexity(stored, ids, 8) == pytest.approx(float(torch.stack(losses).mean().exp()), rel=1e-5)
    assert perplexity(stored, ids, 40) == pytest.approx(float(whole.exp()), rel=1e-5)


def test_bad_input_is_named():
    with pytest.raises(InputError, match=r"stores: expected 0, 8192 and others, got \[8192\]"):
        PretrainedClaim(model="m", stores=(8192,))
    with pytest.raises(InputError, match="dense: expected 512 or more, got 100"):
        PretrainedClaim(model="m", dense=100)
