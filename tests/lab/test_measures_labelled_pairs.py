"""Pairs of labelled texts."""

from pathlib import Path

from polyformer_lab.measures.texts import TEST, TRAIN, labelled_pairs, opposites


def test_pairs_have_both_labels_in_both_orders():
    rows = [("bad", "0"), ("good", "1"), ("poor", "0"), ("fine", "1"), ("great", "1")]
    assert opposites(rows) == [
        ("good", "bad", "0"),
        ("bad", "fine", "1"),
        ("fine", "poor", "0"),
        ("poor", "good", "1"),
    ]


def test_pairs_are_written_for_each_file(tmp_path: Path):
    source = tmp_path / "source"
    source.mkdir()
    for file in (TRAIN, TEST):
        (source / file).write_text("good\t1\nbad\t0\n")
    labelled_pairs(
        tmp_path, vocabulary=60, sets={"sst2": {"source": str(source), "words": 5, "texts": 9, "tests": 9}}
    )
    lines = (tmp_path / "sst2-pairs" / TEST).read_text().splitlines()
    assert lines == ["text\tpair\tlabel", "good\tbad\t0", "bad\tgood\t1"]
