"""Every format becomes the same rows, in memory and streamed; what is wrong is said in one line."""

import gzip
import json
import os
from pathlib import Path

import datasets
import huggingface_hub.constants
import pyarrow as pa
import pytest
from pyarrow import parquet

from polyformer.core.errors import InputError
from polyformer.data.formats.readers import PIECE
from polyformer.data.sources.origins import open_source
from polyformer.data.sources.splits import DataConfig, load, read

TEXT, LABELLED, PAIRS, TAGGED = ("text",), ("text", "label"), ("source", "target"), ("tokens", "tags")


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(name, text):
    data = text if isinstance(text, bytes) else text.encode()
    Path(name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return name


def rows(path, needs=TEXT, **options):
    """All rows of `path`, which must be the same in memory and streamed."""
    held = list(read(DataConfig(**options), needs, path))
    assert list(read(DataConfig(streaming=True, **options), needs, path)) == held
    return held


def texts(path, **options):
    return [row["text"] for row in rows(path, **options)]


def refuses(message, path, needs=TEXT, **options):
    for streaming in (False, True):
        with pytest.raises(InputError, match=message) as caught:
            list(read(DataConfig(streaming=streaming, **options), needs, path))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_plain_text_by_its_four_documents(name):
    article = " = One = \n \n a b \n = = Part = = \n"
    write(name, f"\n{article} \n = Two = \n\n c \u2028 d \n\n = y = \n z")
    assert texts(name) == [f"\n{article} \n = Two = \n\n c \u2028 d \n\n = y = \n z"]
    lines = [" = One = ", " a b ", " = = Part = = ", " = Two = ", " c \u2028 d ", " = y = ", " z"]
    assert texts(name, format="lines") == lines
    paragraphs = [" = One = \n", " a b \n = = Part = = \n", " = Two = \n", " c \u2028 d \n", " = y = \n z"]
    assert texts(name, format="paragraphs") == paragraphs
    assert texts(name, format="articles") == [f"\n{article} \n", " = Two = \n\n c \u2028 d \n\n = y = \n z"]


def test_a_long_text_comes_in_pieces_that_end_with_a_line():
    text = "".join(f"line {number}\n" for number in range(70_000))
    pieces = texts(write("long.txt", text))
    assert "".join(pieces) == text
    assert len(pieces) == len(text) // PIECE + 1
    assert all(piece.endswith("\n") for piece in pieces)
    unbroken = texts(write("unbroken.txt", "x" * (3 * PIECE)))
    assert [len(piece) for piece in unbroken] == [2 * PIECE, PIECE]


def test_windows_files_lose_their_marks():
    assert texts(write("a.txt", "\ufeffone\r\ntwo\r\n"), format="lines") == ["one", "two"]


def test_patterns_read_files_in_order():
    write("b.txt", "second")
    write("a.txt", "first")
    write("[odd].txt", "brackets")
    assert texts("?.txt") == ["first", "second"]
    assert texts("[odd].txt") == ["brackets"]


def test_an_unknown_format_is_named():
    write("a.txt", "text")
    with pytest.raises(InputError, match="unknown format 'html': expected one of"):
        list(open_source("a.txt", "train", "html"))


def test_tables():
    expected = [{"text": 'He said "no", twice', "label": "1"}, {"text": "two\nlines", "label": "0"}]
    write("a.csv", 'id,label,text\n7,1,"He said ""no"", twice"\n8,0,"two\nlines"\n')
    assert rows("a.csv", LABELLED) == expected
    write("b.csv", '1,"He said ""no"", twice"\n0,"two\nlines"')
    assert rows("b.csv", LABELLED, header=("label", "text")) == expected
    write("a.tsv.gz", '1\t"quoted, not closed\n0\tb\n')
    assert rows("a.tsv.gz", LABELLED, header=("label", "text")) == [
        {"text": '"quoted, not closed', "label": "1"},
        {"text": "b", "label": "0"},
    ]


def test_json_lines_with_columns_of_other_names():
    write("a.jsonl", '{"review": "good \\u00e9", "stars": 5, "x": null}\n\n{"stars": 1, "review": "bad"}\n')
    assert rows("a.jsonl", LABELLED, columns={"text": "review", "label": "stars"}) == [
        {"text": "good é", "label": 5},
        {"text": "bad", "label": 1},
    ]


def test_parquet():
    parquet.write_table(pa.table({"text": ["a", "b", "c"], "other": [1.0, 2.0, 3.0]}), "a.parquet")
    assert texts("a.parquet") == ["a", "b", "c"]


def test_tagged_sentences():
    expected = [{"tokens": ["the", "fox"], "tags": ["O", "B-x"]}, {"tokens": ["#1"], "tags": ["O"]}]
    assert rows(write("a.conll", "the\tO\nfox\tB-x\n\t\n\n#1\tO"), TAGGED) == expected
    four = "-DOCSTART- -X- -X- O\n\nthe DT I-NP O\nfox NN I-NP B-x\n\n#1 CD I-NP O\n"
    assert rows(write("four.conll", four), TAGGED) == expected
    header = ("tokens", "tags", "chunks", "entities")
    assert rows("four.conll", TAGGED, header=header)[0]["tags"] == ["DT", "NN"]
    assert rows("four.conll", TAGGED, header=header, columns={"tags": "chunks"})[0]["tags"] == [
        "I-NP",
        "I-NP",
    ]


def test_parallel_files_stay_parallel():
    write("train.en.gz", "one\u2028still\rone\n\nthree\n")
    write("train.de.gz", "eins\n\ndrei")
    assert rows("train.{en,de}.gz", PAIRS) == [
        {"source": "one\u2028still\rone", "target": "eins"},
        {"source": "", "target": ""},
        {"source": "three", "target": "drei"},
    ]


def saved_rows(count, offset=0):
    features = datasets.Features(
        text=datasets.Value("string"),
        label=datasets.ClassLabel(names=["bad", "good"]),
        tags=datasets.Sequence(datasets.ClassLabel(names=["O", "B"])),
    )
    items = [{"text": f"t{i + offset}", "label": i % 2, "tags": [1, 0]} for i in range(count)]
    return datasets.Dataset.from_list(items, features=features)


def test_a_saved_data_set_gives_the_names_of_classes():
    saved_rows(2).save_to_disk("saved")
    assert rows("saved", (*LABELLED, "tags")) == [
        {"text": "t0", "label": "bad", "tags": ["B", "O"]},
        {"text": "t1", "label": "good", "tags": ["B", "O"]},
    ]


def test_a_saved_data_set_with_splits():
    splits = {"train": saved_rows(4), "valid": saved_rows(2, 10), "test": saved_rows(1, 20)}
    datasets.DatasetDict(splits).save_to_disk("saved")
    loaded = load(DataConfig(path="saved", test="saved"), TEXT)
    assert [[row["text"] for row in part] for part in loaded] == [
        ["t0", "t1", "t2", "t3"],
        ["t10", "t11"],
        ["t20"],
    ]
    datasets.DatasetDict({"valid": saved_rows(2)}).save_to_disk("other")
    refuses("other: no train split; it has valid", "other")


def test_the_default_text_needs_no_file():
    train, validation, test = load(DataConfig(), TEXT)
    held, total = (
        sum(map(len, texts)) for texts in (validation["text"], [*train["text"], *validation["text"]])
    )
    assert held == pytest.approx(0.05 * total, rel=0.2)
    assert test is None


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_held_out_are_spread_and_the_same_in_both_ways(streaming):
    write("a.csv", "text,label\n" + "".join(f"{number},x\n" for number in range(98)))
    config = DataConfig(path="a.csv", validation_fraction=0.1, streaming=streaming)
    train, validation, _ = load(config, LABELLED)
    assert [int(row["text"]) for row in validation] == list(range(4, 98, 10))
    assert [int(row["text"]) for row in train] == [number for number in range(98) if number % 10 != 4]


@pytest.mark.parametrize("streaming", [False, True])
def test_of_texts_the_fraction_is_of_characters(streaming):
    lengths = [1 + (number * 37) % 101 for number in range(400)]
    write("a.txt", "".join("x" * length + "\n" for length in lengths))
    config = DataConfig(path="a.txt", format="lines", validation_fraction=0.1, streaming=streaming)
    train, validation, _ = load(config, TEXT)
    sizes = [len(row["text"]) for row in validation]
    assert sum(sizes) == pytest.approx(0.1 * sum(lengths), abs=51), "to half the longest text"
    assert sorted(sizes + [len(row["text"]) for row in train]) == sorted(lengths)


def test_of_few_texts_the_ends_are_held_out():
    write("a.txt", "".join(f"line {number}\n" for number in range(100)))
    train, validation, _ = load(DataConfig(path="a.txt", validation_fraction=0.1), TEXT)
    assert train["text"][0] + validation["text"][0] == Path("a.txt").read_text()
    assert validation["text"][0].startswith("line 90\n")


def test_of_few_labelled_rows_one_is_held_out():
    write("a.csv", "text,label\na,0\nb,1\nc,0\n")
    train, validation, _ = load(DataConfig(path="a.csv"), LABELLED)
    assert train["text"][:] == ["a", "b"]
    assert validation["text"][:] == ["c"]


@pytest.mark.parametrize("streaming", [False, True])
def test_splits_of_their_own_files_and_none_held_out(streaming):
    write("a.txt", "a")
    write("b.txt", "b")
    config = DataConfig(path="a.txt", validation="b.txt", test="b.txt", streaming=streaming)
    assert [[row["text"] for row in part] for part in load(config, TEXT)] == [["a"], ["b"], ["b"]]
    assert load(DataConfig(path="a.txt", validation_fraction=0, streaming=streaming), TEXT).validation is None


def test_too_little_to_hold_out():
    write("a.csv", "text,label\na,0\n")
    with pytest.raises(InputError, match=r"validation_fraction: a.csv is too short .* validation_fraction=0"):
        load(DataConfig(path="a.csv"), LABELLED)
    with pytest.raises(
        InputError, match=r"a.csv: no row to hold out for validation; name a validation source"
    ):
        load(DataConfig(path="a.csv", streaming=True), LABELLED)


def test_a_stream_can_be_resumed():
    write("a.txt", "\n".join(map(str, range(20))))
    config = DataConfig(format="lines", streaming=True)
    stream = read(config, TEXT, "a.txt")
    iterator = iter(stream)
    first = [next(iterator)["text"] for _ in range(7)]
    again = read(config, TEXT, "a.txt")
    again.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    assert first + [row["text"] for row in again] == list(map(str, range(20)))


def test_nothing_is_written_beside_the_data():
    write("a.txt", "a\nb\n")
    rows("a.txt", format="lines")
    assert [path.name for path in Path().iterdir()] == ["a.txt"]


def test_missing_and_empty_files():
    refuses("^nowhere.txt: no such file$", "nowhere.txt")
    refuses("^own/data: no such file; a data set of the hub is written hub:own/data$", "own/data")
    refuses("^b.de: no such file", write("b.en", "x") and "b.{en,de}", PAIRS)
    refuses(r"^none\*.txt: no such file", "none*.txt")
    os.mkfifo("fifo.txt")
    refuses("^fifo.txt: expected a file, got a FIFO$", "fifo.txt")
    for name in ("empty.txt", "empty.jsonl", "empty.csv", "empty.conll", "empty.txt.gz"):
        refuses(f"^{name}: empty: there is nothing to read in it$", write(name, ""))
    refuses("blank.txt: empty", write("blank.txt", "\n \n"), format="lines")


def test_damaged_files():
    refuses("^latin.txt: not UTF-8 text .* iconv -f LATIN1 -t UTF-8$", write("latin.txt", b"caf\xe9 au lait"))
    write("latin.de", b"caf\xe9\n")
    write("latin.en", b"coffee\n")
    for pair in ("latin.{de,en}", "latin.{en,de}"):
        refuses("^latin.de: not UTF-8 text", pair, ("source", "target"))
    whole = gzip.compress(b"".join(b"%d\n" % number for number in range(9999)))
    Path("cut.txt.gz").write_bytes(whole[:-9])
    refuses("^cut.txt.gz: truncated: the gzip file ends too early; fetch it again$", "cut.txt.gz")
    Path("bad.txt.gz").write_bytes(whole[:100] + bytes(100) + whole[200:])
    refuses("^bad.txt.gz: a damaged gzip file", "bad.txt.gz")
    refuses(r"^a.parquet: not a Parquet file, or a damaged one \(", write("a.parquet", "text"))


def test_lines_that_do_not_parse():
    refuses("^a.jsonl, line 2: not JSON ", write("a.jsonl", '{"text": "a"}\n{"text": \n'))
    refuses("^b.jsonl, element 1: expected an object, got 1$", write("b.jsonl", "[1]\n"))
    refuses("^a.csv, line 3: 1 fields where 2 columns are expected", write("a.csv", "text,x\na,b\nc\n"))
    refuses("^b.csv, line 2: not CSV ", write("b.csv", 'text\n"a"b"\n'))
    write("a.conll", "a\tO\nfox\n")
    refuses(r"^a.conll, line 2: 1 fields where 2 are expected \(tokens, tags\): fox$", "a.conll", TAGGED)
    write("a.en", "1\n2\n3\n")
    write("a.de", "1\n2\n")
    refuses(
        "^a.de has 2 lines and a.en has more; parallel files need the same number of lines$",
        "a.{en,de}",
        PAIRS,
    )


def test_a_wrong_column_names_those_there_are():
    write("a.jsonl", '{"review": "a"}\n')
    refuses("^a.jsonl, row 1: no column 'text'; it has 'review': say which .* {text: review}$", "a.jsonl")
    refuses(
        r"no column 'body' \(columns gives it for 'text'\); it has 'review'",
        "a.jsonl",
        columns={"text": "body"},
    )
    write("a.tsv", "a film\t1\nanother\t0\n")
    refuses(
        "no column 'text'; it has 'a film', '1': .* is not a heading, name the columns with header", "a.tsv"
    )
    write("b.jsonl", '{"text": "a"}\n{"txt": "b"}\n')
    refuses("^b.jsonl, row 2: no column 'text'; it has 'txt'", "b.jsonl")


def test_values_of_the_wrong_kind():
    write("a.jsonl", '{"text": 7, "label": null, "tags": "O"}\n')
    refuses("^a.jsonl, row 1: column 'text' holds 7, expected text$", "a.jsonl")
    refuses("^a.jsonl: column 'label' is empty in every row", "a.jsonl", ("label",))
    write("c.jsonl", '{"label": []}\n')
    refuses(r"column 'label' holds \[\], expected a single value$", "c.jsonl", ("label",))
    refuses("column 'tags' holds 'O', expected a list of texts$", "a.jsonl", ("tags",))
    write("b.jsonl", '{"label": 7}\n{"label": "x"}\n')
    with pytest.raises(InputError, match=r"^b.jsonl: a column holds values of several types"):
        read(DataConfig(), ("label",), "b.jsonl")


def test_an_unknown_format_is_asked_for():
    write("notes.md", "text")
    refuses(r"^notes.md: its name does not tell its format .* say format=, one of text, lines", "notes.md")
    assert texts("notes.md", format="text") == ["text"]
    write("a.txt", "text")
    refuses("^header: a.txt is read as text; only csv, tsv, conll take a header$", "a.txt", header=("text",))
    Path("folder").mkdir()
    refuses(
        r"^folder: a directory, but neither one written by save_to_disk nor one .* such as folder/\*.txt$",
        "folder",
    )


def test_damaged_saved_data():
    saved_rows(2).save_to_disk("saved")
    next(Path("saved").glob("*.arrow")).write_bytes(b"nothing")
    refuses(r"^saved: a damaged data set \(", "saved")
    Path("splits").mkdir()
    Path("splits/dataset_dict.json").write_text("{")
    refuses("^splits/dataset_dict.json: not JSON", "splits")


def test_the_hub_out_of_reach(monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    refuses("^hub:own/data: cannot be read from the hub .* check the name and the network", "hub:own/data")


def test_config_is_plain_data_and_checked():
    config = DataConfig(path="a.tsv", header=("text", "label"), columns={"text": "x"}, streaming=True)
    assert DataConfig.from_json(config.to_json()) == config
    assert DataConfig.from_yaml(config.to_yaml()) == config
    with pytest.raises(InputError, match=r"validation_fraction: expected a share from 0 to 0.5, got 0.7"):
        DataConfig(validation_fraction=0.7)
