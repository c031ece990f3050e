"""GLUE, SuperGLUE and XNLI in their published files: rows, tasks and metrics."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from polyformer.cli.main import main
from polyformer.core.errors import InputError
from polyformer.data.formats.guess import guess
from polyformer.data.formats.published import BENCHMARKS, published_in, read_benchmark

A, B = "a dog sleeps", "a cat runs"
MNLI = [
    "index",
    "promptID",
    "pairID",
    "genre",
    "sentence1_binary_parse",
    "sentence2_binary_parse",
    "sentence1_parse",
    "sentence2_parse",
    "sentence1",
    "sentence2",
    "label1",
]
MNLI_LABELS = "entailment", "neutral", "contradiction"
XNLI = [
    "language",
    "gold_label",
    *MNLI[4:8],
    "sentence1",
    "sentence2",
    "promptID",
    "pairID",
    "match",
]


def table(*rows: Sequence[object]) -> str:
    return "".join("\t".join(map(str, row)) + "\n" for row in rows)


def objects(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def pairs(first: str, second: str, labels: Sequence[object]) -> str:
    return objects(*({first: A, second: B, "label": label, "idx": i} for i, label in enumerate(labels)))


def nli(column: str) -> str:
    rows = [[i, *"123456", "", A, B, label, label] for i, label in enumerate(MNLI_LABELS)]
    return table([*MNLI, column], *rows)


def multirc() -> dict[str, object]:
    answers = [{"text": "yes", "label": 1, "idx": 0}, {"text": "no", "label": 0, "idx": 1}]
    questions = [{"question": f"Does {name} sleep?", "answers": answers, "idx": name} for name in (0, 1)]
    return {"idx": 7, "passage": {"text": A, "questions": questions}}


def record() -> dict[str, object]:
    answers = [{"start": 2, "end": 4, "text": "dog"}]
    query = {"query": "The @placeholder sleeps", "answers": answers, "idx": {"passage": 0, "query": 0}}
    return {"source": "CNN", "passage": {"text": A, "entities": [{"start": 2, "end": 4}]}, "qas": [query]}


def wsc(label: bool) -> dict[str, object]:
    target = {"span1_index": 0, "span1_text": "Mark", "span2_index": 2, "span2_text": "he"}
    return {"text": "Mark said he slept", "target": target, "label": label, "idx": 0}


def copa(label: int) -> dict[str, object]:
    return {"premise": "It fell.", "choice1": A, "choice2": B, "question": "cause", "label": label, "idx": 0}


WIC = {"word": "bank", "sentence1": A, "sentence2": B, "start1": 0, "end1": 1, "version": 1.1}
STSB = [
    "index",
    "genre",
    "filename",
    "year",
    "old_index",
    "source1",
    "source2",
    "sentence1",
    "sentence2",
    "score",
]
FILES = {  # a file of each format, and its first row
    "glue-cola": (table(["gj04", 1, "", A], ["gj04", 0, "*", B]), {"text": A, "label": "1"}),
    "glue-sst2": (table(["sentence", "label"], [A, 1], [B, 0]), {"text": A, "label": "1"}),
    "glue-mrpc": (
        table(["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"], [1, 2, 3, A, B], [0, 2, 3, B, A]),
        {"text": A, "pair": B, "label": "1"},
    ),
    "glue-stsb": (
        table(STSB, *([i, "news", "f", 2012, i, "n", "n", A, B, i + 0.5] for i in range(4))),
        {"text": A, "pair": B, "label": "0.5"},
    ),
    "glue-qqp": (  # the published file has lines with missing columns
        table(
            ["id", "qid1", "qid2", "question1", "question2", "is_duplicate"],
            [0, 1, 2, A, B, 0],
            [9, 9],
            [1, 3, 4, A, A, 1],
        ),
        {"text": A, "pair": B, "label": "0"},
    ),
    "glue-mnli": (nli("gold_label"), {"text": A, "pair": B, "label": "entailment"}),
    "glue-qnli": (
        table(
            ["index", "question", "sentence", "label"], [0, A, B, "entailment"], [1, A, B, "not_entailment"]
        ),
        {"text": A, "pair": B, "label": "entailment"},
    ),
    "glue-rte": (
        table(["index", "sentence1", "sentence2", "label"], [0, A, B, "entailment"], [1, A, A, "not"]),
        {"text": A, "pair": B, "label": "entailment"},
    ),
    "glue-wnli": (
        table(["index", "sentence1", "sentence2", "label"], [0, A, B, 1], [1, A, B, 0]),
        {"text": A, "pair": B, "label": "1"},
    ),
    "superglue-boolq": (
        pairs("passage", "question", [True, False]),
        {"text": A, "pair": B, "label": "true"},
    ),
    "superglue-cb": (
        pairs("premise", "hypothesis", MNLI_LABELS),
        {"text": A, "pair": B, "label": "entailment"},
    ),
    "superglue-copa": (
        objects(copa(1), copa(0)),
        {"text": "It fell. What was the cause?", "choices": [A, B], "label": 1},
    ),
    "superglue-multirc": (
        objects(multirc()),
        {"text": A, "pair": "Does 0 sleep? yes", "label": "1", "group": "7-0"},
    ),
    "superglue-record": (
        objects(record()),
        {
            "question": "The @placeholder sleeps",
            "context": A,
            "answers": {"text": ["dog"], "answer_start": [2]},
        },
    ),
    "superglue-rte": (pairs("premise", "hypothesis", ["entailment", "not_entailment"]), None),
    "superglue-wic": (
        objects({**WIC, "label": True}, {**WIC, "label": False}),
        {"text": f"bank: {A}", "pair": B, "label": "true"},
    ),
    "superglue-wsc": (
        objects(wsc(True), wsc(False)),
        {"text": "Mark said *he* slept", "pair": "Mark", "label": "true"},
    ),
    "xnli": (
        table(
            ["premise", "hypo", "label"], *([A, B, label] for label in (*MNLI_LABELS[:2], "contradictory"))
        ),
        {"text": A, "pair": B, "label": "entailment", "group": "train"},
    ),
}
XNLI_ROWS = table(
    XNLI, *([lang, label, *"1234", A, B, 1, 2, 1] for lang in ("en", "vi") for label in MNLI_LABELS)
)


def published(root: Path, name: str) -> Path:
    """Write the data set into a folder with the published names."""
    benchmark = BENCHMARKS[name]
    folder = root / benchmark.folder
    folder.mkdir()
    for file in filter(None, (benchmark.path, benchmark.validation, benchmark.test)):
        text = XNLI_ROWS if name == "xnli" and file != benchmark.path else FILES[name][0]
        (folder / file).write_text(text, encoding="utf-8")
    (folder / f"test{Path(benchmark.path).suffix}").write_text("index\tsentence\n0\tno label\n")
    return folder


@pytest.mark.parametrize("name", BENCHMARKS)
def test_rows_and_tasks(tmp_path: Path, name: str):
    folder = published(tmp_path, name)
    first = next(read_benchmark(name, folder / BENCHMARKS[name].path))
    assert first == (FILES[name][1] or {"text": A, "pair": B, "label": "entailment"})
    guessed = guess(str(folder), {})
    assert guessed.data["format"] == name
    assert guessed.kind == BENCHMARKS[name].task
    assert guessed.task == BENCHMARKS[name].options
    assert Path(guessed.data["validation"]).name == BENCHMARKS[name].validation
    assert Path(guessed.data.get("test", "none")).name == (BENCHMARKS[name].test or "none")
    named = guess(str(folder / BENCHMARKS[name].path), {"format": name})
    assert named.kind == guessed.kind
    assert "test" not in named.data


def test_other_folders_and_columns(tmp_path: Path):
    folder = published(tmp_path, "glue-cola")
    assert published_in(folder)
    (folder / "train.tsv").write_text("text\tlabel\na\t1\nb\t0\n")  # of this name, but other columns
    assert published_in(folder) is None
    assert published_in(published(tmp_path, "superglue-cb").parent) is None
    (folder / "a.jsonl").write_text('{"index": 1}\n')
    with pytest.raises(InputError, match=r"row 1: expected a labelled row of CB as published, got index"):
        list(read_benchmark("superglue-cb", folder / "a.jsonl"))
    short = list(read_benchmark("glue-qqp", published(tmp_path, "glue-qqp") / "train.tsv"))
    assert [row["label"] for row in short] == ["0", "1"]


TINY = [
    "--steps",
    "1",
    "--model.hidden_size",
    "16",
    "--model.intermediate_size",
    "16",
    "--model.num_hidden_layers",
    "1",
]


@pytest.mark.parametrize(
    ("name", "metrics"),
    [
        ("glue-cola", ["accuracy", "matthews"]),
        ("glue-mrpc", ["accuracy", "f1"]),
        ("glue-stsb", ["pearson", "spearman"]),
        ("superglue-copa", ["accuracy"]),
        ("superglue-multirc", ["accuracy", "f1", "exact_match"]),
        ("superglue-record", ["exact_match", "f1"]),
        ("xnli", ["accuracy", "accuracy_en", "accuracy_vi"]),
    ],
)
def test_a_run_reports_the_metrics(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, metrics: list[str]
):
    folder, out = published(tmp_path, name), tmp_path / "run"
    small = ["--tokenizer.algorithm", "bytes", "--device", "cpu", "--model.num_attention_heads", "2"]
    assert main(["train", "--data", str(folder), "--out", str(out), *TINY, *small]) == 0
    capsys.readouterr()
    assert main(["evaluate", str(out)]) == 0
    printed = capsys.readouterr().out
    assert [metric for metric in metrics if metric.replace("_", " ") not in printed] == []
