"""Questions from files of every kind, demonstrations beside them, and what is wrong with a file."""

import json
from pathlib import Path

import pytest

from polyformer.applications.prompting import (
    Example,
    Sources,
    Template,
    choice_metrics,
    read_examples,
    split_examples,
    text_metrics,
)
from polyformer.core.errors import InputError


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


def test_files(tmp_path: Path):
    rows = [{"input": "2+2?", "target": 4, "choices": ["4", "5"]}, {"input": "Why?", "target": None}]
    path = write(tmp_path, "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    assert read_examples(path, Sources()) == [Example("2+2?", "4", ("4", "5")), Example("Why?")]
    path = write(tmp_path, "b.csv", "q,input,choices\na,b,c|d\n")
    assert read_examples(path, Sources(columns={"input": "q"})) == [Example("a", None, ("c", "d"))]
    path = write(tmp_path, "c.txt", "Xin chào?\tHello\n\nWhat?\n")
    assert read_examples(path, Sources()) == [Example("Xin chào?", "Hello"), Example("What?")]
    path = write(tmp_path, "d.tsv", "fine\t1\ndull\t0\n")
    sources = Sources(header=("input", "target"), words={"0": "bad", "1": "good"}, choices=("bad", "good"))
    assert [row.target for row in read_examples(path, sources)] == ["good", "bad"]
    assert read_examples(path, sources)[0].choices == ("bad", "good")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"text": "a"},
            r"row 1: no column 'input'; it has 'text'; name the column of the question with --columns",
        ),
        ({"input": " "}, "row 1: expected a text as its input, got ' '"),
        ({"input": "a", "target": "x", "choices": ["b", "c"]}, "the target 'x' is not among the choices"),
        ({"input": "a", "choices": ["b"]}, "expected two or more different choices, got \\['b'\\]"),
        ({"input": "a", "choices": ["b", "b"]}, "expected two or more different choices"),
        ({"input": "a", "choices": 7}, "expected choices as a list, or separated by |, got 7"),
        ({"input": "a", "target": ["b"]}, "expected a text as its target, got \\['b'\\]"),
        ({"input": "a", "target": "2"}, "--targets has no word for '2'"),
    ],
)
def test_rows_that_are_no_questions(tmp_path: Path, row: dict[str, object], message: str):
    path = write(tmp_path, "a.jsonl", json.dumps(row))
    words = {"0": "zero"} if row.get("target") == "2" else {}
    with pytest.raises(InputError, match=message):
        read_examples(path, Sources(words=words))


def test_a_file_without_rows(tmp_path: Path):
    with pytest.raises(InputError, match=r"a\.txt: empty"):
        read_examples(write(tmp_path, "a.txt", "\n"), Sources())
    with pytest.raises(InputError, match=r"none\.txt: no such file"):
        read_examples(str(tmp_path / "none.txt"), Sources())


def test_demonstrations_and_questions_are_drawn_by_the_seed():
    rows = [Example(str(i), f"answer {i}") for i in range(20)]
    two, asked = split_examples(rows, None, 2, 5, seed=3)
    four, same = split_examples(rows, None, 4, 5, seed=3)
    assert four[:2] == two
    assert same == asked == sorted(asked, key=lambda row: int(row.input))
    assert not {*four} & {*asked}
    assert split_examples(rows, None, 2, 5, seed=4) != (two, asked)
    assert len(split_examples(rows, None, 4, None, 0)[1]) == 16


def test_no_demonstration_is_asked():
    rows = [Example("a", "1"), Example("b", "2"), Example("c")]
    others = [Example("a", "1"), Example("d", "4"), Example("e")]
    assert split_examples(rows, others, 1, None, 0) == ([Example("d", "4")], rows)
    with pytest.raises(InputError, match="shots: expected at most 1, the number of rows with a target"):
        split_examples(rows, others, 2, None, 0)
    with pytest.raises(InputError, match="shots: 2 of 2 rows leave no question"):
        split_examples(rows[:2], None, 2, None, 0)
    twice = [Example("a", "1"), Example("a", "1"), Example("b", "2")]
    for seed in range(4):
        (shown,), asked = split_examples(twice, None, 1, None, seed)
        assert shown.input not in {row.input for row in asked}


def test_a_template():
    template = Template("Q: {input}\nA: {target}", "\n--\n")
    assert template.demonstrations([Example("a", "b")]) == "Q: a\nA: b\n--\n"
    assert template.question(Example("{target} {input}")) == "Q: {target} {input}\nA:"
    assert template.question(Example("a"), "c") == "Q: a\nA: c"
    for form in ("{input}", "{target}{input}", "{input} {target}.", "{input}{input}{target}"):
        with pytest.raises(InputError, match=r"template: expected \{input\} once and \{target\} at the end"):
            Template(form)


def test_metrics():
    assert choice_metrics(["a", "b", "a"], ["a", "a", "a"]) == {
        "accuracy": pytest.approx(2 / 3),
        "f1_macro": pytest.approx((4 / 5 + 0) / 2),
        "majority": 1.0,
        "questions": 3,
    }
    assert text_metrics(["The cat.", "a red dog"], ["cat", "dog"]) == {
        "exact_match": 0.5,
        "f1": pytest.approx((1 + 2 / 3) / 2),
        "questions": 2,
    }
