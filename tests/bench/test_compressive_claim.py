"""The claim of compressed memories: its text, its verdict, its states, and a small run of the real thing."""

import csv
import gzip
from pathlib import Path

import pytest

from polyformer import InputError
from polyformer.bench.remembering import remembered_text
from polyformer.bench.reproduce.compressive import COMPRESSIVE, RECENT, CompressiveClaim, run, table, verdict

BOOK = "".join(f"Line {i} of the book, and all was quiet.\r\n" for i in range(400))
FILE = f"Licence\r\n*** START OF THIS BOOK ***\r\n{BOOK}*** END OF THIS BOOK ***\r\nLicence\r\n"


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt.gz"
    path.write_bytes(gzip.compress(FILE.encode("utf-8-sig")))
    return path


def test_a_book_is_cut_at_a_line_and_freed_of_what_is_not_the_book(book: Path):
    data = remembered_text(str(book), book.parent)
    train, held = (Path(data[role]).read_text() for role in ("path", "validation"))
    assert train + held == BOOK.replace("\r\n", "\n")
    assert train.endswith(".\n")
    assert held.startswith("Line 381 ")
    assert data["format"] == "text"
    book.write_text("no line")
    with pytest.raises(InputError, match="too short a book to hold out the last twentieth"):
        remembered_text(str(book), book.parent)


def test_lower_perplexity_with_every_seed_is_a_reproduction():
    results = {RECENT: {0: 40.0, 1: 42.0}, COMPRESSIVE: {0: 39.0, 1: 41.0}}
    assert (
        "equal state: reproduced (with 2 of 2 seeds; 40.00 beside 41.00 on average)" in verdict(results).text
    )
    results[COMPRESSIVE][1] = 42.0
    assert "differs from the paper (with 1 of 2 seeds; 40.50 beside" in verdict(results).text
    assert [line.split() for line in table(results)][1:] == [
        [RECENT, "40.000", "42.000", "41.000"],
        [COMPRESSIVE, "39.000", "42.000", "40.500"],
    ]


def test_states_are_of_one_size():
    memories = CompressiveClaim(memory=20, compressed=10, rate=2).memories()
    assert memories == {
        RECENT: "recurrent(length=30)",
        COMPRESSIVE: "compressive(length=20, compressed_length=10, rate=2)",
    }


def test_a_run_writes_its_figures_and_goes_on(book: Path, capsys: pytest.CaptureFixture[str]):
    config = CompressiveClaim(
        data=str(book),
        length=8,
        memory=8,
        compressed=4,
        rate=2,
        steps=3,
        batch_tokens=64,
        layers=1,
        width=16,
        heads=2,
        vocabulary=300,
        seeds=(0, 3),
        out=str(book.parent / "claim"),
    )
    first = run(config)
    assert first[RECENT][0] != first[COMPRESSIVE][0] != first[COMPRESSIVE][3]
    with (book.parent / "claim" / "compressive.csv").open() as file:
        rows = list(csv.DictReader(file))
    values = {(row["memory"], int(row["seed"])): float(row["perplexity"]) for row in rows}
    assert values == {(name, seed): first[name][seed] for name in first for seed in (0, 3)}
    assert (book.parent / "claim" / "compressive.png").read_bytes().startswith(b"\x89PNG")
    assert run(config) == first, "what is finished is not trained again"
    assert "a compressed memory lowers perplexity at equal state" in capsys.readouterr().out


def test_bad_input_is_named():
    with pytest.raises(InputError, match="seeds: expected a number or more, got none"):
        CompressiveClaim(seeds=())
