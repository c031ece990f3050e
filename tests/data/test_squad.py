"""SQuAD's file and its scores, by the examples of its script's rules."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from polyformer.core.errors import InputError
from polyformer.data import DataConfig, load
from polyformer.data.formats.published import (
    are_answers,
    exact_match,
    f1,
    normal_form,
    read_squad,
)

FILE = {
    "data": [
        {
            "title": "T",
            "paragraphs": [
                {
                    "context": "Oslo is a city.",
                    "qas": [
                        {"id": "1", "question": "What?", "answers": [{"text": "a city", "answer_start": 8}]},
                        {"id": "2", "question": "Why?", "answers": [], "is_impossible": True},
                    ],
                }
            ],
        }
    ]
}
NEEDS = ("question", "context", "answers")


def test_rows(tmp_path: Path):
    path = tmp_path / "questions.json"
    path.write_text(json.dumps(FILE))
    rows = list(read_squad(path))
    assert [row["id"] for row in rows] == ["1", "2"]
    assert rows[0]["answers"] == {"text": ["a city"], "answer_start": [8]}
    assert rows[1] == {
        "id": "2",
        "article": "T",
        "question": "Why?",
        "context": "Oslo is a city.",
        "answers": {"text": [], "answer_start": []},
    }
    for streaming in (False, True):
        config = DataConfig(path=str(path), format="squad", validation_fraction=0.0, streaming=streaming)
        loaded = list(load(config, NEEDS).train)
        assert loaded == [{name: row[name] for name in NEEDS} for row in rows]


def test_a_file_that_is_not_squad_is_refused(tmp_path: Path):
    path = tmp_path / "questions.json"
    path.write_text("{")
    with pytest.raises(InputError, match=r"questions.json: not JSON \(.*, line 1, column 2\)"):
        list(read_squad(path))
    for text in ("{}", json.dumps({"data": [{"paragraphs": [{"qas": [{}]}]}]})):
        path.write_text(text)
        with pytest.raises(
            InputError, match=r"questions.json: not a file of SQuAD: expected data > paragraphs"
        ):
            list(read_squad(path))


def test_answers_of_another_form_are_refused(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "q", "context": "c", "answers": ["c"]}))
    with pytest.raises(InputError, match=r"column 'answers' holds \['c'\], expected answers \{text"):
        load(DataConfig(path=str(path), validation_fraction=0.0), NEEDS)
    assert are_answers({"text": ["c"], "answer_start": [0]})
    assert not are_answers({"text": ["c"], "answer_start": []})
    assert not are_answers({"text": [1], "answer_start": [0]})


def test_normal_form():
    assert normal_form(" The  Cat's, (a) hat! ") == "cats hat"
    assert normal_form("Theatre, another an") == "theatre another"


def test_exact_match_and_f1():
    assert exact_match("the Denver Broncos!", ["Carolina Panthers", "Denver Broncos"]) == 1
    assert exact_match("Denver", ["Denver Broncos"]) == 0
    assert f1("Denver", ["Denver Broncos", "Carolina"]) == pytest.approx(2 / 3)  # precision 1, recall 1/2
    assert f1("b b c", ["b c c"]) == pytest.approx(2 / 3)  # words count as often as they occur
    assert f1("x", ["y"]) == 0


def test_no_answer():
    assert exact_match("", []) == f1("", []) == 1
    assert exact_match("x", []) == f1("x", []) == 0
    assert f1("", ["x"]) == 0
    assert exact_match("", ["the", "x"]) == f1("", ["the", "x"]) == 0  # "the" is nothing and does not count
    assert exact_match("the", ["a"]) == 1  # both are nothing in normal form, and so is the truth


def test_xquad_is_whole(shared_data: Callable[[str], Path]):
    rows = list(read_squad(shared_data("xquad") / "xquad.vi.json"))
    assert len(rows) == 1190
    assert all(
        row["context"][start : start + len(text)] == text
        for row in rows
        for text, start in zip(*row["answers"].values())
    )
