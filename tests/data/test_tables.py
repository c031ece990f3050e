"""Tables as spreadsheets and scripts write them: delimiters, quoted line breaks, byte order marks, JSON."""

import gzip
from pathlib import Path

import pytest

from pairwise import pairwise
from polyformer import InputError
from polyformer.data.formats import tables
from polyformer.data.formats.guess import guess
from polyformer.data.formats.readers import read_conllu
from polyformer.data.formats.tables import SAMPLE, delimiter_of, has_quotes, read_csv, read_jsonl

ROWS = [{"text": "a, fine\nfilm", "label": "1"}, {"text": 'so "long"; dull', "label": "0"}]


@pytest.mark.parametrize(
    ("delimiter", "end", "encoding"), pairwise([",", ";", "\t"], ["\n", "\r\n"], ["utf-8", "utf-8-sig"])
)
def test_csv_of_spreadsheets(tmp_path: Path, delimiter: str, end: str, encoding: str):
    lines = ["text?label", '"a, fine\nfilm"?1', '"so ""long""; dull"?0', ""]
    content = end.join(lines).replace("?", delimiter).encode(encoding)
    for name, content_of_file in (("a.csv", content), ("a.csv.gz", gzip.compress(content))):
        (tmp_path / name).write_bytes(content_of_file)
        assert list(read_csv(tmp_path / name)) == ROWS
    guessed = guess(str(tmp_path / "a.csv"), {})
    assert guessed.kind == "classify"
    assert ("guessed delimiter" in guessed.said[0]) == (delimiter != ",")


def test_the_delimiter_is_the_one_that_cuts_all_lines_alike():
    assert delimiter_of(["a;b\n", "1,5;2\n"]) == ";"
    assert delimiter_of(["text\n", "one; two\n", "three; four\n"]) == ","
    assert delimiter_of(["a;b;c\n", "1;2\n"]) == ";"
    assert delimiter_of(["a,b\n", "1\n"]) == ","
    assert delimiter_of([]) == ","
    cut_within_quotes = ["a;b\n"] + ["1;2\n"] * (SAMPLE - 2) + ['"begun;\n']
    assert delimiter_of(cut_within_quotes) == ";"


@pytest.mark.parametrize(
    ("text", "quoted"),
    [
        ('a\tb\n"one ""two"""\t1\n', True),
        ('a\tb\n"one\ttwo"\t1\n', True),
        ('a\tb\n"one\ntwo"\t1\n', True),
        ('"a"\t"b"\n"one"\t1\n', True),
        ('a\tb\n"one"\t1\n', False),
        ('a\tb\n"one" and "two"\t1\n', False),
        ('a\tb\n5" pipe\t1\n', False),
        ('a\tb\n"not closed\t1\n', False),
        ('a\tb\n"one\t1\ntwo"\t2\n', False),  # a mark each in two texts
        ("a\tb\none\t1\n", False),
        ('a\n"one ""two"""\n', False),  # no tab
    ],
)
def test_quotation_marks_belong_to_the_format_or_to_the_text(tmp_path: Path, text: str, quoted: bool):
    path = tmp_path / "a.tsv"
    path.write_text(text)
    assert has_quotes(path) == quoted


@pytest.mark.parametrize("limit", [{"QUOTED": 3}, {"QUOTED_CHARACTERS": 20}], ids=str)
def test_quotation_marks_are_looked_for_in_the_first_lines(
    tmp_path: Path, limit: dict[str, int], monkeypatch: pytest.MonkeyPatch
):
    for name, value in limit.items():
        monkeypatch.setattr(tables, name, value)
    path = tmp_path / "a.tsv"
    path.write_text('a\tb\n"one ""two"""\t1\n"cut\nhere"\t1\n')  # the sample ends within quotes
    assert has_quotes(path)
    path.write_text('a\tb\none\t1\ntwo\t1\nten\t2\n"one ""two"""\t1\n')
    assert not has_quotes(path)


def test_a_row_of_another_length_is_named_with_its_line(tmp_path: Path):
    path = tmp_path / "a.csv"
    path.write_text('a;b\n"1\n2";3\n4\n')
    with pytest.raises(InputError, match=r"a\.csv, line 4: 1 fields where 2 columns are expected \(a, b\)"):
        list(read_csv(path))


@pytest.mark.parametrize(
    "text",
    [
        '[{"text": "a"}, {"text": "b"}]',
        '\ufeff\n[\n  {"text": "a"},\r\n  {"text":\n "b"}\n]\n',
        '{"text": "a"}\n\n{"text": "b"}',
    ],
    ids=["list", "list over lines", "lines"],
)
def test_json_is_lines_or_one_list(tmp_path: Path, text: str):
    for name, content in (("a.json", text.encode()), ("a.json.gz", gzip.compress(text.encode()))):
        (tmp_path / name).write_bytes(content)
        assert list(read_jsonl(tmp_path / name)) == [{"text": "a"}, {"text": "b"}]
        assert guess(str(tmp_path / name), {}).kind == "lm"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{\n  "rows": 1\n}',
            r"a\.json, line 1: not JSON .*; expected an object on each line, or one list of",
        ),
        ('[{"text": "a"}, 1]', r"a\.json, element 2: expected an object, got 1"),
        ('[{"text": "a"}', r"a\.json: not JSON"),
    ],
)
def test_json_of_another_shape_is_refused(tmp_path: Path, text: str, message: str):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(InputError, match=message):
        list(read_jsonl(tmp_path / "a.json"))


def test_conllu_gives_the_words_and_their_parts_of_speech(tmp_path: Path):
    def word(number: str, form: str, tag: str) -> str:
        return "\t".join([number, form, form, tag, *["_"] * 6]) + "\n"

    path = tmp_path / "de.conllu"
    contracted = word("1-2", "zum", "_") + word("1", "zu", "ADP") + word("2", "dem", "DET")
    path.write_text(f"# text = zum Haus\n{contracted}{word('2.1', 'x', 'X')}\n{word('1', 'Haus', 'NOUN')}")
    assert list(read_conllu(path)) == [
        {"tokens": ["zu", "dem"], "tags": ["ADP", "DET"]},
        {"tokens": ["Haus"], "tags": ["NOUN"]},
    ]
    assert guess(str(path), {}).kind == "tag"
    path.write_text("1\tHaus\n")
    with pytest.raises(InputError, match=r"de\.conllu, line 1: 2 fields where CoNLL-U has 10"):
        list(read_conllu(path))
