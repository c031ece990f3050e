"""The claims of stores: verdict, a small run of the real thing, and the benchmark of look-ups."""

import csv
from pathlib import Path

import pytest

from polyformer import InputError
from polyformer.bench import store
from polyformer.bench.experiment import DIFFERS, UNSHOWN
from polyformer.bench.reproduce.memorizing import (
    FURTHER,
    STORED,
    TUNED,
    WITHOUT,
    MemorizingClaim,
    run,
    table,
    verdicts,
)

PAPER = {
    WITHOUT: {0: 20.0},
    STORED: {0: 21.0, 8: 19.0, 64: 18.0, 256: 17.9},
    TUNED: {0: 19.6, 8: 18.5, 64: 18.1, 256: 18.0},
    FURTHER: {0: 19.5},
}


def test_perplexity_that_falls_with_the_store_is_a_reproduction():
    larger, tuned = (verdict.text for verdict in verdicts(PAPER, 64))
    assert "perplexity: reproduced (21.00 with 0 entries, 18.00 with 64, best 17.90; without 20.00)" in larger
    assert "had none: reproduced (it wins 1.40, beside 2.00 by training with a store)" in tuned
    assert [line.split() for line in table(PAPER)][1:3] == [
        ["none", "20.00", "-", "-", "-"],
        ["store", "21.00", "19.00", "18.00", "17.90"],
    ]


@pytest.mark.parametrize(
    ("name", "changes", "difference"),
    [
        (STORED, {8: 21.5}, "differs from the paper: perplexity rises as the store grows ("),
        (STORED, {0: 18.0, 8: 18.0}, "it does not fall"),
        (WITHOUT, {0: 17.95}, "the decoder without is as good"),
        (TUNED, {64: 18.8}, "had none: differs from the paper (it wins 0.70, beside 2.00"),
    ],
)
def test_every_difference_is_named(name: str, changes: dict[int, float], difference: str):
    judged = verdicts({**PAPER, name: {**PAPER[name], **changes}}, 64)
    assert [verdict.outcome for verdict in judged if difference in verdict.text] == [DIFFERS]


def test_without_the_training_store_there_is_no_verdict():
    larger, _ = verdicts({**PAPER, STORED: {64: 18.0}}, 64)
    assert larger.outcome == UNSHOWN
    assert larger.text.startswith("no verdict: it needs stores of less than 64")


def test_a_run_writes_its_figures_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    book = tmp_path / "book.txt"
    book.write_text("".join(f"Line {i} of the book, and all was quiet.\n" for i in range(400)))
    config = MemorizingClaim(
        data=str(book),
        length=8,
        memory=8,
        store=32,
        neighbours=4,
        stores=(0, 32, 64),
        steps=3,
        tuning=2,
        batch_tokens=64,
        layers=1,
        width=16,
        heads=2,
        vocabulary=300,
        out=str(tmp_path / "claim"),
    )
    first = run(config)
    assert first[STORED][0] != first[STORED][32] != first[STORED][64]
    assert first[TUNED][32] != first[FURTHER][0] != first[WITHOUT][0]
    with (tmp_path / "claim" / "memorizing.csv").open() as file:
        rows = list(csv.DictReader(file))
    values = {(row["decoder"], int(row["store"])): float(row["perplexity"]) for row in rows}
    assert values == {(name, size): x for name, sizes in first.items() for size, x in sizes.items()}
    assert (tmp_path / "claim" / "memorizing.png").read_bytes().startswith(b"\x89PNG")
    assert run(config) == first, "what is finished is not trained again"
    assert "a larger store lowers perplexity" in capsys.readouterr().out


def test_bad_input_is_named():
    with pytest.raises(InputError, match=r"stores: expected sizes of 0 or more, got \[-1\]"):
        MemorizingClaim(stores=(-1,))


def test_every_search_is_measured(capsys: pytest.CaptureFixture[str]):
    config = store.StoreBench(entries=300, queries=7, width=8, neighbours=3, centres=4, rank=2, peer=False)
    taken = store.run(config)
    assert list(taken) == ["look up, tiled", "look up, plain", "look up, faiss", "store"]
    assert all(milliseconds > 0 for milliseconds in taken.values())
    assert "look up, tiled" in capsys.readouterr().out


def test_the_public_package_takes_part_where_it_is():
    pytest.importorskip("memorizing_transformers_pytorch")
    config = store.StoreBench(entries=300, queries=7, width=8, neighbours=3, centres=4, rank=2)
    taken = store.run(config)
    assert taken["recall, look up, memorizing-transformers"] > 0.5
