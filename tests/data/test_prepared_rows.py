"""Rows and batches of prepared text are those of the same documents in memory."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from polyformer.core.errors import InputError
from polyformer.data import Collate, Tokenizer, TokenizerConfig, load_tokenizer, pack
from polyformer.data.prepared import FramedText, Settings, preparing
from polyformer.data.prepared import rows as in_order
from polyformer.data.prepared.rows import MappedBatches, MappedSegments, PackedText, open_prepared
from polyformer.data.rows import Position
from polyformer.data.rows.packing import Segments

BOS, EOS, PAD = 257, 258, 256
TEXTS = ["x" * (number * 7 % 23) for number in range(60)] + ["", "y" * 90, ""]


def prepared(folder: Path, texts: list[str], **settings) -> Path:
    """The texts as bytes, in shards of about forty."""
    Tokenizer.train(TokenizerConfig(algorithm="bytes"), []).save(folder / "tokenizer")
    (folder / "texts.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    fingerprint = load_tokenizer(folder / "tokenizer").fingerprint
    chosen = Settings(tokenizer=fingerprint, **{"validation": 0, "shard_tokens": 40, **settings})
    preparing.prepare([str(folder / "texts.jsonl")], chosen, folder, 1, print)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("prepared"), TEXTS)


def framed(folder: Path) -> FramedText:
    text = open_prepared(str(folder), "train")
    assert text is not None
    return FramedText(text.parts[0], BOS, EOS)


def documents(texts: list[str]) -> list[list[int]]:
    return [[BOS, *text.encode(), EOS] for text in texts]


def plain(rows) -> list[dict[str, list[int]]]:
    return [{name: value.tolist() for name, value in row.items()} for row in rows]


@pytest.mark.parametrize("length", [1, 2, 5, 16, 64, 300])
def test_rows_are_those_of_packed_documents(folder: Path, length: int):
    rows = PackedText(framed(folder), length, PAD)
    expected = list(pack(documents(TEXTS), length, pad_id=PAD, last="drop"))
    assert len(rows) == len(expected) > 0
    assert plain(rows[number] for number in reversed(range(len(rows)))) == plain(expected)[::-1]


def test_less_text_than_a_row_is_padded(folder: Path):
    (row,) = pack(documents(TEXTS), 4000, pad_id=PAD)
    rows = PackedText(framed(folder), 4000, PAD)
    assert len(rows) == 1
    assert plain([rows[0]]) == plain([row])


def batches(*folders: Path, rates: tuple[float, ...] = (1.0,), rows: int = 3, **options) -> MappedBatches:
    parts = [PackedText(framed(folder), 8, PAD) for folder in folders]
    return MappedBatches(parts, rates, rows, Collate(PAD), seed=5, **options)


def test_an_epoch_has_every_row_once_in_an_order_of_its_own(folder: Path):
    rows = Counter(tuple(row["labels"].tolist()) for row in PackedText(framed(folder), 8, PAD))
    orders = []
    for epoch in (0, 1, 2):
        stacked = [batch["labels"] for _, batch in batches(folder).epoch(epoch)]
        assert {len(batch) for batch in stacked[:-1]} == {3}
        orders.append([tuple(row) for row in torch.cat(stacked).tolist()])
        assert Counter(orders[-1]) == rows
    assert orders[0] != orders[1] != orders[2]
    assert orders[0] == [
        tuple(row) for _, batch in batches(folder).epoch(0) for row in batch["labels"].tolist()
    ]


def test_any_number_of_processes_goes_on_in_the_middle(folder: Path):
    def corrupt(row, generator):
        return {**row, "noise": np.array([generator.integers(1000)])}

    drawn = batches(folder, corrupt=corrupt)
    whole = [plain([batch])[0] for _, batch in drawn.epoch(1)]
    for skip in (0, 1, 7, len(whole)):
        at = [plain([batch])[0] for _, batch in drawn.epoch(1, position=Position(0, skip))]
        assert at == whole[skip:]
        for world in (1, 2, 3):
            shares = [[plain([b])[0] for b in drawn.batches(1, skip + rank, world)] for rank in range(world)]
            assert all(shares[rank] == whole[skip + rank :: world] for rank in range(world))


def test_a_mixture_keeps_its_rates_and_uses_all_of_each_part(folder: Path, tmp_path: Path):
    other = prepared(tmp_path, ["z" * 30] * 6)
    mixed = batches(folder, other, rates=(0.25, 0.75), rows=4)
    parts = [len(part) for part in mixed.parts]
    seen = []
    for epoch in range(4):
        rows = [row for _, batch in mixed.epoch(epoch) for row in batch["input_ids"].tolist()]
        assert abs(len(rows) - sum(parts)) <= 1
        seen += rows
    of_other = Counter(tuple(row) for row in seen if ord("z") in row)
    assert sum(of_other.values()) == round(0.75 * 4 * sum(parts))
    turns = sum(of_other.values()) / parts[1]
    rows_of = Counter(tuple(row["input_ids"].tolist()) for row in mixed.parts[1])
    assert all(abs(of_other[row] - number * turns) <= number for row, number in rows_of.items())


@pytest.mark.parametrize("rows", [1, 3, 7])
def test_documents_in_order_are_those_of_segments(folder: Path, rows: int):
    mapped = MappedSegments(framed(folder), 16, rows, 5, PAD)
    expected = Segments(documents(TEXTS), 16, rows, 5, True, PAD)
    for epoch in (0, 1):
        for skip in (0, 2):
            pairs = zip(
                mapped.epoch(epoch, position=(0, skip)),
                expected.epoch(epoch, position=(0, skip)),
                strict=True,
            )
            for (position, batch), (place, other) in pairs:
                assert position == place
                assert plain([batch]) == plain([other])


def test_of_many_documents_neighbours_are_shuffled_together(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(in_order, "GROUPS", 10)
    orders = []
    for epoch in (0, 1):
        ids, numbers = [], []
        for _, batch in MappedSegments(framed(folder), 16, 1, 5, PAD).epoch(epoch):
            ids += batch["input_ids"][0].tolist()
            numbers += batch["document_ids"][0].tolist()
        assert numbers == sorted(numbers)
        parts = [[i for i, n in zip(ids, numbers) if n == number] for number in dict.fromkeys(numbers)]
        parts[-1].append(EOS)  # which predicts nothing, and is not read
        assert sorted(parts) == sorted(documents(TEXTS))
        orders.append(parts)
    assert orders[0] != orders[1]
    assert orders[0] != documents(TEXTS)


def test_files_of_mixtures(folder: Path, tmp_path: Path):
    other = prepared(tmp_path / "other", ["z" * 30] * 6)
    file = tmp_path / "mix.yaml"
    file.write_text(f"{folder}: 3\nother: 1\n")
    text = open_prepared(str(file), "train")
    assert text is not None
    assert text.rates == [0.75, 0.25]
    assert [row["text"] for row in text] == TEXTS + ["z" * 30] * 6
    assert open_prepared(str(file), "validation") is None
    for tree, message in (
        ("[1]", r"mix.yaml: expected folders and weights"),
        ("other: -1", r"mix.yaml: other: expected a weight above 0, got -1"),
        ("none: 1", r"none: no prepared text"),
    ):
        file.write_text(tree)
        with pytest.raises(InputError, match=message):
            open_prepared(str(file), "train")
    tokenizer = Tokenizer.train(TokenizerConfig(algorithm="characters"), ["abc"])
    tokenizer.save(other / "tokenizer")
    file.write_text(f"{folder}: 3\nother: 1\n")
    with pytest.raises(InputError, match=r"other/tokenizer: not the tokenizer that made the tokens"):
        open_prepared(str(file), "train")
