"""The data sets of GLUE, SuperGLUE and XNLI in their published files, with the metrics that they report.

A format such as `glue-cola` or `superglue-boolq` reads a file of the published archive and yields the columns
of a task: text and label, text, pair and label, and so on. `published_in` recognizes the folder of a data
set by its name and its files. The published test files of GLUE and SuperGLUE have no labels and are not read.

Sources: Wang et al. 2019 (GLUE), table 1; Wang et al. 2019 (SuperGLUE), table 1; Conneau et al. 2018 (XNLI).

Deviations: ReCoRD is read as questions with an answer in the passage, so that any span can be an answer and
not only its entities. The diagnostic sets have no training data and are not read.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from polyformer.core.errors import InputError
from polyformer.data.formats.tables import Header, Row, read_jsonl, read_tsv
from polyformer.data.sources.files import lines_of, opened, plain_name

Convert = Callable[[Row], Iterator[Row]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A data set: its task with options, and the names of its folder and files."""

    task: str
    convert: Convert
    folder: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of the task
    path: str = "train.tsv"
    validation: str = "dev.tsv"
    test: str | None = None
    header: tuple[str, ...] | None = None
    skips_short: bool = False  # the published file has some lines with missing columns


def _columns(**roles: str) -> Convert:
    """Return a function that renames columns: role=column."""

    def convert(row: Row) -> Iterator[Row]:
        chosen = {role: row[column] for role, column in roles.items()}
        yield {**chosen, "label": _spelled(chosen["label"])}

    return convert


def _pair(first: str, second: str, label: str = "label") -> Convert:
    return _columns(text=first, pair=second, label=label)


def _spelled(value: object) -> object:
    """Return a label that is a number or a truth value as its JSON text."""
    return str(value).lower() if isinstance(value, int) else value


def _copa(row: Row) -> Iterator[Row]:
    asked = {"cause": "What was the cause?", "effect": "What happened as a result?"}[row["question"]]
    choices = [row["choice1"], row["choice2"]]
    yield {"text": f"{row['premise']} {asked}", "choices": choices, "label": row["label"]}


def _multirc(row: Row) -> Iterator[Row]:
    for question in row["passage"]["questions"]:
        for answer in question["answers"]:
            yield {
                "text": row["passage"]["text"],
                "pair": f"{question['question']} {answer['text']}",
                "label": _spelled(answer["label"]),
                "group": f"{row['idx']}-{question['idx']}",
            }


def _record(row: Row) -> Iterator[Row]:
    for query in row["qas"]:
        answers = query["answers"]
        yield {
            "question": query["query"],
            "context": row["passage"]["text"],
            "answers": {
                "text": [answer["text"] for answer in answers],
                "answer_start": [answer["start"] for answer in answers],
            },
        }


def _wic(row: Row) -> Iterator[Row]:
    yield {
        "text": f"{row['word']}: {row['sentence1']}",
        "pair": row["sentence2"],
        "label": _spelled(row["label"]),
    }


def _wsc(row: Row) -> Iterator[Row]:
    """Mark the pronoun by asterisks, as T5 does; the pair is the noun that it may mean."""
    words, target = row["text"].split(), row["target"]
    start, length = target["span2_index"], len(target["span2_text"].split())
    words[start] = f"*{words[start]}"
    words[start + length - 1] += "*"
    yield {"text": " ".join(words), "pair": target["span1_text"], "label": _spelled(row["label"])}


def _xnli(row: Row) -> Iterator[Row]:
    """Read XNLI's own file, or a translation of MultiNLI (premise, hypo, label)."""
    if "hypo" in row:
        label = {"contradictory": "contradiction"}.get(row["label"], row["label"])
        yield {"text": row["premise"], "pair": row["hypo"], "label": label, "group": "train"}
    else:
        yield {
            "text": row["sentence1"],
            "pair": row["sentence2"],
            "label": row["gold_label"],
            "group": row["language"],
        }


def _superglue(folder: str, convert: Convert, task: str = "classify_pair", **options: Any) -> Benchmark:
    path, validation = "train.jsonl", "val.jsonl"
    return Benchmark(
        task=task, convert=convert, folder=folder, options=options, path=path, validation=validation
    )


def _glue(folder: str, convert: Convert, task: str = "classify_pair", **options: Any) -> Benchmark:
    return Benchmark(task=task, convert=convert, folder=folder, **options)


_COLA = {"header": ("source", "label", "mark", "text"), "options": {"metrics": ["matthews"]}}
_MNLI = {"validation": "dev_matched.tsv", "test": "dev_mismatched.tsv"}

BENCHMARKS: Mapping[str, Benchmark] = {
    "glue-cola": _glue("CoLA", _columns(text="text", label="label"), "classify", **_COLA),
    "glue-sst2": _glue("SST-2", _columns(text="sentence", label="label"), "classify"),
    "glue-mrpc": _glue("MRPC", _pair("#1 String", "#2 String", "Quality"), options={"metrics": ["f1"]}),
    "glue-stsb": _glue("STS-B", _pair("sentence1", "sentence2", "score"), "regress_pair"),
    "glue-qqp": _glue(
        "QQP", _pair("question1", "question2", "is_duplicate"), options={"metrics": ["f1"]}, skips_short=True
    ),
    "glue-mnli": _glue("MNLI", _pair("sentence1", "sentence2", "gold_label"), **_MNLI),
    "glue-qnli": _glue("QNLI", _pair("question", "sentence")),
    "glue-rte": _glue("RTE", _pair("sentence1", "sentence2")),
    "glue-wnli": _glue("WNLI", _pair("sentence1", "sentence2")),
    "superglue-boolq": _superglue("BoolQ", _pair("passage", "question")),
    "superglue-cb": _superglue("CB", _pair("premise", "hypothesis")),
    "superglue-copa": _superglue("COPA", _copa, "choose"),
    "superglue-multirc": _superglue("MultiRC", _multirc, "classify_grouped", metrics=["f1"]),
    "superglue-record": _superglue("ReCoRD", _record, "qa"),
    "superglue-rte": _superglue("RTE", _pair("premise", "hypothesis")),
    "superglue-wic": _superglue("WiC", _wic),
    "superglue-wsc": _superglue("WSC", _wsc),
    "xnli": Benchmark(
        task="classify_grouped",
        convert=_xnli,
        folder="XNLI",
        options={"group_metrics": ["accuracy_by_group"]},
        path="multinli.train.en.tsv",
        validation="xnli.dev.tsv",
        test="xnli.test.tsv",
    ),
}
"""The data sets by the name of their format."""


def read_benchmark(name: str, path: Path, header: Header = None) -> Iterator[Row]:
    """Yield the rows of the data set `name`; raises `InputError` for a file with other columns."""
    benchmark = BENCHMARKS[name]
    for number, row in enumerate(_raw(benchmark, path), 1):
        try:
            yield from benchmark.convert(row)
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise InputError(
                f"{path}, row {number}: expected a labelled row of {benchmark.folder} as published, got "
                f"{', '.join(map(str, row)):.200} ({type(error).__name__}: {error}); the test files of GLUE "
                "and SuperGLUE have no labels"
            ) from error


BENCHMARK_READERS = {name: functools.partial(read_benchmark, name) for name in BENCHMARKS}
"""A reader for each data set."""


def published_in(folder: Path) -> tuple[str, dict[str, str]] | None:
    """Return the format of the data set in `folder` and its sources by role; None for another folder.

    The folder has the published name, and its first file has the published columns.
    """
    for name, benchmark in BENCHMARKS.items():
        files = {"path": benchmark.path, "validation": benchmark.validation, "test": benchmark.test}
        sources = {role: str(folder / file) for role, file in files.items() if file}
        if folder.resolve().name == benchmark.folder and all(
            Path(source).is_file() for source in sources.values()
        ):
            try:
                next(read_benchmark(name, Path(sources["path"])), None)
            except InputError:
                continue
            return name, sources
    return None


def _raw(benchmark: Benchmark, path: Path) -> Iterator[Row]:
    if plain_name(path.name).endswith(".jsonl"):
        return read_jsonl(path)
    if benchmark.skips_short:
        return _whole_rows(path)
    return read_tsv(path, benchmark.header)


def _whole_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a table without the lines that have too few fields, as GLUE's own baselines do."""
    with opened(path) as file:
        lines = (line.rstrip("\r\n").split("\t") for line in lines_of(file, path))
        names = next(lines, [])
        yield from (dict(zip(names, fields)) for fields in lines if len(fields) >= len(names))
