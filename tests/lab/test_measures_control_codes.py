"""Documents behind control codes, and the judge of their kinds."""

from pathlib import Path

from polyformer_lab.measures.control_codes import CODES, LENGTH, Judge, by_code, coded_documents
from polyformer_lab.measures.texts import SPLITS


def test_documents_of_both_kinds_are_as_many_and_some_are_held_out(tmp_path: Path):
    coded_documents(tmp_path, None, 12_000)
    train, held_out = (by_code(tmp_path / f"{split}.jsonl") for split in SPLITS)
    for code in CODES:
        assert (len(train[code]), len(held_out[code])) == (38, 2)
        assert {len(text) for text in train[code]} == {LENGTH}
    judge = Judge(train)
    assert all(judge.share(held_out[code], code) == 1 for code in CODES)


def test_a_judge_weighs_the_share_of_each_n_gram_in_its_kind():
    judge = Judge({"a": ["abcabcabc"], "b": ["xyzxyz", "abcxyz"]})
    assert [judge.kind(text) for text in ("abc", "xyz", "abcxyzxyz")] == ["a", "b", "b"]
    assert judge.share(["abc", "xyz", "xyz", "xyz"], "b") == 0.75
