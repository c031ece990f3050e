"""Files as people write them: the guess is right, or the error names the choice to make."""

import csv
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from polyformer import InputError
from polyformer.data import DataConfig, read
from polyformer.data.formats.columns import KINDS
from polyformer.data.formats.guess import Guess, guess

FILMS = [
    {"text": "a fine film", "label": "good"},
    {"text": "long, and dull; so long", "label": "bad"},
    {"text": 'so "fine"\na cast', "label": "good"},
    {"text": "dull", "label": "bad"},
    {"text": "a plot | at last", "label": "good"},
    {"text": "no\tplot", "label": "bad"},
]
FRAME = pd.DataFrame(FILMS)
TEXTS = [{"text": row["text"]} for row in FILMS]
PLAIN = "text,label\na film,good\ndull,bad\na cast,good\nno plot,bad\n"
PLAIN_ROWS = list(csv.DictReader(io.StringIO(PLAIN)))
PAIRS = [{"source": "Go.", "target": "Geh."}, {"source": "I won!", "target": "Gewonnen!"}]
SQUAD_1 = [{"id": "1", "question": "Who?", "answers": [{"text": "Goethe", "answer_start": 0}]}]
SQUAD_2 = [{**SQUAD_1[0], "is_impossible": False}]
SQUAD_2 += [{"id": "2", "question": "When?", "answers": [], "is_impossible": True}]


def table(frame: pd.DataFrame = FRAME, **options: Any) -> str:
    return frame.to_csv(**options)


def windows(text: str) -> str:
    """The text with a byte order mark and line ends of Windows, outside of quotes."""
    return "\ufeff" + text.replace("\n", "\r\n")


def parquet(frame: pd.DataFrame) -> bytes:
    buffer = io.BytesIO()
    frame.to_parquet(buffer)
    return buffer.getvalue()


def lines(*rows: dict[str, Any]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def squad(questions: list[Any]) -> str:
    paragraph = {"context": "Goethe wrote Faust.", "qas": questions}
    return json.dumps({"version": "2.0", "data": [{"title": "Faust", "paragraphs": [paragraph]}]})


def saved_twice() -> str:
    return table(pd.read_csv(io.StringIO(table())))


TALL = FRAME.set_index(pd.MultiIndex.from_product([[0, 1, 2], [0, 1]]))
NAMED = FRAME.set_axis([f"film {number}" for number in range(6)])
LATE = FRAME.set_axis([9, 2, 30, 4, 17, 8])
ALL, NO_NUMBERS = csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC

# name: content. All are read as FILMS, for classification.
CLASSIFIED: dict[str, str | bytes] = {
    "index.csv": table(),
    "no-index.csv": table(index=False),
    "index-label.csv": table(index_label="number"),
    "late-index.csv": table(LATE),
    "saved-twice.csv": saved_twice(),
    "reset-index.csv": table(FRAME.reset_index()),
    "multi-index.csv": table(TALL),
    "named-index.csv": table(NAMED),
    "no-header.csv": table(header=False),
    "neither.csv": table(header=False, index=False),
    "semicolons.csv": table(sep=";"),
    "tabs.csv": table(sep="\t"),
    "bars.csv": table(sep="|"),
    "all-quoted.csv": table(quoting=ALL),
    "texts-quoted.csv": table(quoting=NO_NUMBERS),
    "mark.csv": "\ufeff" + table(),
    "unicode-text.txt": table(sep="\t", index=False).encode("utf-16"),
    "unicode.csv": ("\ufeff" + table(index=False)).encode("utf-16-le"),
    "unicode-big.csv": ("\ufeff" + table(index=False)).encode("utf-16-be"),
    "unicode.tsv": table(sep="\t").encode("utf-16"),
    "unicode.jsonl": windows(FRAME.to_json(orient="records", lines=True)).encode("utf-16-le"),
    "unicode-packed.csv.gz": gzip.compress(table().encode("utf-16")),
    "packed.csv.gz": gzip.compress(table().encode()),
    "index.tsv": table(sep="\t"),
    "no-index.tsv": table(sep="\t", index=False),
    "all-quoted.tsv": table(sep="\t", quoting=ALL),
    "tabs.txt": table(sep="\t", index=False),
    "packed.tsv.gz": gzip.compress(table(sep="\t").encode()),
    "records.json": FRAME.to_json(orient="records"),
    "records-spread.json": FRAME.to_json(orient="records", indent=4),
    "columns.json": FRAME.to_json(),
    "columns-late.json": LATE.to_json(),
    "columns-spread.json": FRAME.to_json(indent=4),
    "index.json": FRAME.to_json(orient="index"),
    "index-spread.json": FRAME.to_json(orient="index", indent=4),
    "split.json": FRAME.to_json(orient="split"),
    "split-spread.json": FRAME.to_json(orient="split", indent=4),
    "table.json": FRAME.to_json(orient="table"),
    "table-spread.json": FRAME.to_json(orient="table", indent=4),
    "rows.jsonl": FRAME.to_json(orient="records", lines=True),
    "rows.ndjson": windows(FRAME.to_json(orient="records", lines=True)),
    "packed.jsonl.gz": gzip.compress(FRAME.to_json(orient="records", lines=True).encode()),
    "index.parquet": parquet(FRAME),
    "late-index.parquet": parquet(LATE),
    "named-index.parquet": parquet(NAMED),
    "excel.csv": "sep=;\n" + table(sep=";", index=False),
    "excel-index.csv": '\ufeff"sep=;"\r\n' + table(sep=";"),
    "colons.csv": "sep=:\n" + table(sep=":", index=False),
    "comment.csv": "# exported, 2024, by hand\n" + table(index=False),
    "comments.csv": "# exported\n\n#by hand\n" + table(),
    "comment.tsv": "# exported\n" + table(sep="\t", index=False),
    "names.csv": table(FRAME.rename(columns={"text": "Review", "label": "Sentiment"})),
}

# name: content. All are read as PLAIN_ROWS.
PLAIN_TABLES: dict[str, str] = {
    "windows.csv": windows(PLAIN),
    "windows.tsv": windows(PLAIN.replace(",", "\t")),
    "excel-windows.csv": windows("sep=;\n" + PLAIN.replace(",", ";")),
    "empty-columns.csv": "".join(f"{line},,\n" for line in [*PLAIN.splitlines(), ",", ","]),
    "empty-middle.csv": PLAIN.replace(",", ",,"),
    "empty-lines.csv": PLAIN.replace("\n", "\n\n"),
    "empty-lines.tsv": PLAIN.replace(",", "\t").replace("\n", "\n\t\n"),
    "spaces.csv": PLAIN.replace(",", ", ").replace("good", "good ").replace("text", " text "),
    "hash-header.csv": "#id,text,label\n" + table(pd.DataFrame(PLAIN_ROWS), header=False),
    "rows-of-r.csv": '"","text","label"\n"1","a film","good"\n"2","dull","bad"\n"3","a cast","good"\n'
    '"4","no plot","bad"\n',
}

# name, content, task, rows, columns or header
OTHERS: list[tuple[str, str | bytes, str, list[Any], dict[str, Any]]] = [
    ("text.csv", table(FRAME[["text"]]), "lm", TEXTS, {}),
    ("series.csv", FRAME["text"].to_csv(), "lm", TEXTS, {}),
    (
        "unicode-notes.txt",
        windows("một\n🙂 phim\n").encode("utf-16-le"),
        "lm",
        [{"text": "một\r\n🙂 phim\r\n"}],
        {},
    ),
    ("halves.csv", table(FRAME.assign(split=["left", "half"] * 3)), "classify", FILMS, {"split": None}),
    ("only-train.csv", table(FRAME.assign(split="train")), "classify", FILMS, {"split": None}),
    ("only-tests.csv", table(FRAME.assign(split=["dev", "test"] * 3)), "classify", FILMS, {"split": None}),
    ("text.json", FRAME[["text"]].to_json(), "lm", TEXTS, {}),
    ("comment-text.csv", "# exported\ntext\nan apple\n", "lm", [{"text": "an apple"}], {}),
    ("hashtags.tsv", "#a b\t1\n#c\t0\nd e\t1\nf\t0\n", "classify", [], {"header": ["text", "label"]}),
    (
        "quotes.tsv",
        'text\tlabel\n"Go," he said\t1\n"Go."\t0\n',
        "classify",
        [{"text": '"Go," he said'}, {"text": '"Go."'}],
        {},
    ),
    (
        "language.tsv",
        "Hi\ten\nHallo\tde\nBye\ten\nTschau\tde\n",
        "classify",
        [],
        {"header": ["text", "label"]},
    ),
    ("pairs.csv", table(pd.DataFrame(PAIRS)), "translate", PAIRS, {}),
    (
        "codes.csv",
        "en,de\nGo.,Geh.\nI won!,Gewonnen!\n",
        "translate",
        PAIRS,
        {"source": "en", "target": "de"},
    ),
    ("ids.csv", "id,en,de\n1,Go.,Geh.\n2,I won!,Gewonnen!\n", "translate", PAIRS, {"source": "en"}),
    ("indonesian.csv", "id,en\nGo.,Geh.\nI won!,Gewonnen!\n", "translate", PAIRS, {"source": "id"}),
    ("regions.csv", "en-US,de_DE\nGo.,Geh.\nI won!,Gewonnen!\n", "translate", PAIRS, {"source": "en-US"}),
    ("titles.csv", "En,De\nGo.,Geh.\nI won!,Gewonnen!\n", "translate", PAIRS, {"source": "En"}),
    ("words.csv", "English,German\nGo.,Geh.\nI won!,Gewonnen!\n", "translate", PAIRS, {"target": "German"}),
    ("tatoeba.txt", windows("Go.\tGeh.\nI won!\tGewonnen!\n"), "translate", PAIRS, {}),
    (
        "hub.jsonl",
        lines(
            *(
                {"id": str(i), "translation": {"en": p["source"], "de": p["target"]}}
                for i, p in enumerate(PAIRS)
            )
        ),
        "translate",
        PAIRS,
        {"source": "en", "target": "de"},
    ),
    ("hub-row.jsonl", lines({"translation": {"en": "Go.", "de": "Geh."}}), "translate", PAIRS[:1], {}),
    (
        "hub.parquet",
        parquet(pd.DataFrame({"translation": [{"en": p["source"], "de": p["target"]} for p in PAIRS]})),
        "translate",
        PAIRS,
        {},
    ),
    (
        "qqp.csv",
        table(pd.DataFrame({"question1": ["a?", "b?"], "question2": ["c?", "d?"], "is_duplicate": [0, 1]})),
        "classify_pair",
        [{"text": "a?", "pair": "c?", "label": "0"}],
        {},
    ),
    ("ner.conll", "# text = An a\nAn\tB-X\n#1\tO\n\n# doc2\nb\tO\n", "tag", [{"tokens": ["An", "#1"]}], {}),
    ("spaces.conll", "# an example\n# id 1\nAn B-X\n# O\na O\n", "tag", [{"tokens": ["An", "#", "a"]}], {}),
    ("mark.conll", windows("An\tB-X\na\tO\n"), "tag", [{"tokens": ["An", "a"], "tags": ["B-X", "O"]}], {}),
    (
        "ud.conllu",
        "# sent_id = 1\n" + "\t".join(["1", "An", "an", "DET", *"______"]) + "\n",
        "tag",
        [{"tokens": ["An"], "tags": ["DET"]}],
        {},
    ),
    (
        "ud.conll",
        windows("# sent_id = 1\n" + "\t".join(["1", "An", "an", "DET", *"______"]) + "\n"),
        "tag",
        [{"tokens": ["An"], "tags": ["DET"]}],
        {"format": "conllu"},
    ),
    ("squad.json", squad(SQUAD_1), "qa", [{"question": "Who?"}], {"format": "squad", "task": {}}),
    ("squad2.json", squad(SQUAD_2), "qa", [{}, {"question": "When?"}], {"task": {"unanswerable": True}}),
    (
        "squad2.jsonl",
        lines({"question": "Who?", "context": "Goethe.", "answers": {"text": [], "answer_start": []}}),
        "qa",
        [{"question": "Who?"}],
        {"task": {"unanswerable": True}},
    ),
]

# name, content, the beginning of what the error says, after the name of the file
ASKED: list[tuple[str, str | bytes, str]] = [
    ("odd.csv", table(FRAME.set_axis(["phrase", "mood"], axis=1)), "'phrase', 'mood'; .*phrase, label: mood"),
    (
        "numbered.csv",
        table(FRAME.set_axis([0, 1], axis=1)),
        "which are '0', '1'; .*text: \"0\", label: \"1\"",
    ),
    ("numbers.csv", table(FRAME.set_axis([0, 1], axis=1), index=False), "which are '0', '1'; say the task"),
    ("title.csv", "My films\n" + PLAIN, "line 2: 2 fields .*; if line 1 is a title above the column names"),
    ("titles.csv", "My films,\nof 2024,\n" + PLAIN, r"\['text', 'label'\] are probably .*; remove the lines"),
    (
        "comment.csv",
        "# by Ann, today\n" + PLAIN,
        r"\['text', 'label'\] are probably .*; remove the line above",
    ),
    (
        "scores.csv",
        "a film,0.83\ndull,0.1\nlong,0.31\n",
        "the 2 columns cannot be guessed from .*--data.header",
    ),
    (
        "dates.csv",
        "a film,2024-01-01\ndull,2024-01-02\nso,2024-01-02\n",
        "cannot be guessed from .*--data.head",
    ),
    (
        "all-empty.csv",
        "text,label\na film,\ndull, \n",
        "column 'label' is empty in every row; expected labels: fill it, or name another",
    ),
    ("null.jsonl", lines({"text": "a", "label": None}), "column 'label' is empty in every row"),
    (
        "tag.conll",
        "a\t\nb\tO\n",
        r"row 1: column 'tags' holds \['', 'O'\], expected a list of texts; give every word a tag",
    ),
    (
        "hash.conll",
        "# doc1\nAn B-X\na O\n",
        "line 1: # doc1 could be a comment or the word #; remove the comments",
    ),
    (
        "half-split.csv",
        table(FRAME.assign(split=["train", "left"] * 3)),
        "column 'split' holds 'left', expected train, validation or test; .* with --data.split null",
    ),
    ("joined.csv", PLAIN + PLAIN, "line 6: the column names again, .*; remove this line"),
    ("twice.csv", "text,text,label\na,b,c\nd,e,c\n", "line 1: two columns have the name 'text'; rename one"),
    (
        "values.json",
        FRAME.to_json(orient="values"),
        "element 1: .*; write its rows as objects, with pandas df",
    ),
    ("named.json", NAMED.to_json(), "either could be the columns; write its rows as objects"),
    ("broken-split.json", '{"columns": ["a", "b"], "data": [[1]]}', "element 1 of data: expected 2 values"),
    (
        "wide.jsonl",
        lines({"translation": {"en": "a", "de": "b", "fr": "c"}}),
        "task.kind translate .*source: en",
    ),
    ("ids.csv", "id,en\n1,Go.\n2,I won!\n", "cannot tell what its columns are"),
    (
        "latin.csv",
        PLAIN.encode() + b"caf\xe9,bad\n",
        r"not UTF-8 text \(invalid continuation byte 0xe9 at byte 59\); save it as UTF-8, or .* iconv",
    ),
    (
        "far.csv",
        PLAIN.encode() + b"dull,bad\n" * 200_000 + b"\x80,bad\n",
        "invalid start byte 0x80 at byte 1,800,056",
    ),
    (
        "far.csv.gz",
        gzip.compress(b"\xef\xbb\xbf" + PLAIN.encode() + b"dull,bad\n" * 200_000 + b"\x80,bad\n"),
        "invalid start byte 0x80 at byte 1,800,059",
    ),
    ("cut.csv", PLAIN.encode() + b"caf\xc3", "unexpected end of data 0xc3 at byte 59"),
    (
        "unmarked.csv",
        PLAIN.encode("utf-16-le"),
        r"not UTF-8 text \(zero at byte 1, as in UTF-16 without .*\); save it as UTF-8, .* iconv -f UTF-16LE",
    ),
    ("unmarked-big.txt", PLAIN.encode("utf-16-be"), "zero at byte 0, .* iconv -f UTF-16BE -t UTF-8"),
    ("utf32.csv", PLAIN.encode("utf-32"), "not UTF-8 text .* 0xff at byte 0"),
    (
        "half.csv",
        PLAIN.encode("utf-16") + b"a",
        r"not UTF-16 text, which its byte order mark .* \(truncated data at byte 114\); save it as UTF-8",
    ),
    (
        "messages.jsonl",
        lines({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}),
        "the column 'messages' has chats; .* --pretrained MODEL, or write each as a single text",
    ),
    (
        "sharegpt.json",
        json.dumps([{"id": "a", "conversations": [{"from": "human", "value": "Hi"}]}]),
        "the column 'conversations' has chats",
    ),
    (
        "chats.csv",
        table(pd.DataFrame({"messages": [[{"role": "user", "content": "Hi"}]]})),
        "messages' has chats",
    ),
    (
        "alpaca.json",
        json.dumps([{"instruction": "Add", "input": "1 2", "output": "3"}]),
        "'instruction' and 'output' are requests with replies; .*source: instruction, target: output",
    ),
    (
        "completion.jsonl",
        lines({"prompt": "a", "completion": "b"}),
        "kind translate .*source: prompt, target: com",
    ),
    (
        "kto.jsonl",
        lines({"prompt": "a", "completion": "b", "label": True}),
        "'prompt' and 'completion' are req",
    ),
    ("query.csv", "query,response\na,b\nc,d\n", "'query' and 'response' are requests with replies"),
    (
        "dolly.jsonl",
        lines({"instruction": "a", "context": "", "response": "b", "category": "c"}),
        "are requests",
    ),
    (
        "preferences.jsonl",
        lines({"prompt": "a", "chosen": "b", "rejected": "c"}),
        "'chosen' and 'rejected' are preferences; .*task.kind lm --data.columns '{text: chosen}'",
    ),
    (
        "preferred-chats.jsonl",
        lines({"chosen": [{"role": "user", "content": "a"}], "rejected": [{"role": "user", "content": "b"}]}),
        "are preferences; .* or of the chosen chats, write each as a single",
    ),
]


@pytest.fixture
def look(tmp_path: Path) -> Callable[..., tuple[Guess, list[Any]]]:
    """The guess about a file, and its rows as training reads them."""

    def look(name: str, content: str | bytes, kind: str | None = None) -> tuple[Guess, list[Any]]:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        guessed = guess(str(path), {}, kind)
        rows = read(DataConfig.from_dict(guessed.data), KINDS[guessed.kind], str(path))
        return guessed, list(rows)

    return look


@pytest.mark.parametrize("name", CLASSIFIED)
def test_texts_with_labels(name: str, look: Callable[..., Any]):
    guessed, rows = look(name, CLASSIFIED[name])
    assert guessed.kind == "classify"
    assert rows == FILMS


@pytest.mark.parametrize("name", PLAIN_TABLES)
def test_texts_with_labels_among_other_cells(name: str, look: Callable[..., Any]):
    guessed, rows = look(name, PLAIN_TABLES[name])
    assert guessed.kind == "classify"
    assert [{**row, "text": row["text"].strip()} for row in rows] == PLAIN_ROWS


@pytest.mark.parametrize(
    ("name", "content", "kind", "rows", "expected"), OTHERS, ids=[row[0] for row in OTHERS]
)
def test_other_tasks(
    name: str, content: Any, kind: str, rows: list[Any], expected: dict[str, Any], look: Callable[..., Any]
):
    guessed, actual = look(name, content)
    assert guessed.kind == kind
    assert len(actual) >= len(rows) > 0 or "header" in expected
    for row, part in zip(actual, rows):
        assert {role: row[role] for role in part} == part
    seen = {"split": None, **guessed.data.get("columns", {}), **guessed.data, "task": guessed.task}
    assert {option: seen[option] for option in expected} == expected


@pytest.mark.parametrize(("name", "content", "message"), ASKED, ids=[name for name, _, _ in ASKED])
def test_the_unclear_is_asked_about(name: str, content: Any, message: str, look: Callable[..., Any]):
    with pytest.raises(InputError, match=f"{name}[,: ]+.*{message}") as caught:
        look(name, content)
    assert "\n" not in str(caught.value)
