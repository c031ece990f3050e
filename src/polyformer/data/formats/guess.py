"""What a path holds: its format, columns, validation data and task.

Chats, instructions and preferences are recognized in the forms of `chats`. They tune a chat model;
without it, an error says what else they can train.

Only the first rows are read. Each guess is reported in a line with the option that overrides it. If a guess
is not possible, the error names the option to set.
"""

import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from polyformer.core.errors import InputError, quote
from polyformer.core.parsing import parse_yaml
from polyformer.data.episodes import PREFIX, is_minari
from polyformer.data.formats.chats import UNPAIRED, chat_hint, form_of
from polyformer.data.formats.columns import (
    COLUMN,
    KINDS,
    content_roles,
    has_usual_names,
    is_heading,
    is_number_of_row,
    is_unnamed,
    languages,
    named_parts,
    roles,
)
from polyformer.data.formats.directories import choose_files, suffix
from polyformer.data.formats.published import BENCHMARKS, Benchmark, published_in
from polyformer.data.formats.readers import SUFFIXES
from polyformer.data.formats.tables import first_records, has_quotes, has_tabs
from polyformer.data.prepared.rows import is_prepared_source
from polyformer.data.sources.files import lines_of, opened
from polyformer.data.sources.libraries import is_saved
from polyformer.data.sources.origins import (
    SPLITS,
    are_files,
    has_validation,
    open_source,
    parallel_files,
    source_files,
)

Row = dict[str, Any]

CHAT_TASKS = "sft", "dpo"
"""The tasks of chats; `dpo` learns from preferences, `sft` from the other forms."""

ROWS = 500
"""The most rows that are read."""

HEADING = 5
"""Rows in which the names of columns are looked for, to report them below a title."""

ARTICLES = "qnli", "squad"
"""Formats with the article of each row: many questions share a paragraph, and many paragraphs a title."""


@dataclass
class Guess:
    """The `data` section of a recipe, the kind and options of the task, and a line for each guess."""

    data: dict[str, Any]
    kind: str = "lm"
    said: list[str] = field(default_factory=list)
    task: dict[str, Any] = field(default_factory=dict)

    def format(self, options: Mapping[str, Any]) -> str | None:
        """Return the format that the user names, or the guessed format."""
        return options.get("format") or self.data.get("format")

    def explain(self, what: str, value: object, why: str, option: str) -> None:
        """Record a guess, its reason, and the option that overrides it."""
        self.said.append(f"guessed {what}: {value}, {why} ({option})")


def guess(
    path: str,
    options: dict[str, Any],
    kind: str | None = None,
    usual: Callable[[str], Mapping[str, Any]] = lambda kind: {},
    chats: bool = False,
) -> Guess:
    """Guess the content of `path`.

    `options` are the user's data options, `kind` is the user's task, and `usual(kind)` returns the data
    options in the recipe of a task. `chats`: whether there is a chat model, which chats can tune. Raises
    `InputError` if the columns fit no task, and names the options that define them.
    """
    guessed = Guess({"path": path})
    if is_prepared_source(path):
        guessed.kind = kind or "lm"
        if kind is None:
            guessed.explain("task", guessed.kind, "it is prepared text", "--task.kind")
        return guessed
    folder = not path.startswith("hub:") and Path(path).is_dir()
    if folder and not is_saved(Path(path)) and not is_minari(path):
        _look_into(Path(path), guessed)
    path = guessed.data["path"]
    _guess_format(path, guessed, options)
    benchmark = BENCHMARKS.get(guessed.format(options) or "")
    if benchmark is not None and kind in (None, benchmark.task):
        _use_task(benchmark, guessed, kind)
        kind = benchmark.task
    _guess_header(path, guessed, options, kind)
    if not (chats and kind is None and _guess_chats(path, guessed, options)):
        _guess_columns(path, guessed, options, kind)
    _guess_unanswerable(path, guessed, options)
    if benchmark is None:
        _guess_parts(path, guessed, {**usual(guessed.kind), **options})
    _guess_validation(path, guessed, {**usual(guessed.kind), **options})
    return guessed


def guess_reading(path: str, options: dict[str, Any], kind: str, header: list[str] | None = None) -> Guess:
    """Guess the format and the columns of another source for the task `kind`.

    `options` are the data options that are known; `header` are names for the columns of a table without a
    heading.
    """
    guessed = Guess({"path": path}, kind)
    if not is_prepared_source(path):
        _guess_format(path, guessed, options)
        _guess_header(path, guessed, options, kind, header)
        _guess_columns(path, guessed, options, kind)
        _guess_parts(path, guessed, options)
    return guessed


def _look_into(folder: Path, guessed: Guess) -> None:
    """Choose the files of a directory for training and for other splits."""
    published = published_in(folder)
    if published is not None:
        guessed.data.update({"format": published[0], **published[1]})
        guessed.explain("format", published[0], "by its folder and files", "--data.format")
        return
    chosen = choose_files(folder)
    guessed.data.update(chosen.sources)
    if chosen.why:
        guessed.explain("files", Path(guessed.data["path"]).name, chosen.why, "--data FILE")
    if chosen.left_out:
        more = len(chosen.left_out) - 6
        names = ", ".join(chosen.left_out[:6]) + (f" and {more} more" if more > 0 else "")
        guessed.said.append(f"left out: {names} (--data FILE trains on another file)")


def _use_task(benchmark: Benchmark, guessed: Guess, kind: str | None) -> None:
    """Set the task and the metrics of a published data set."""
    guessed.task = dict(benchmark.options)
    if kind is None:
        guessed.explain("task", benchmark.task, f"as {benchmark.folder} is published", "--task.kind")
    for option, names in benchmark.options.items():
        guessed.explain(option, ", ".join(names), f"as {benchmark.folder} is published", f"--task.{option}")


def _sample(path: str) -> Path | None:
    """Return the file to inspect: the first that `path` names or matches; None for parallel files."""
    if parallel_files(path) or is_minari(path) or Path(path).is_dir():
        return None
    return next(iter(source_files(path)), None)


def _guess_format(path: str, guessed: Guess, options: dict[str, Any]) -> None:
    file = _sample(path)
    if "format" in {*options, *guessed.data} or file is None:
        return
    for format, ending, fits, why in _FORMATS:
        if suffix(file) == ending and fits(file):
            guessed.data["format"] = format
            guessed.explain("format", format, why, "--data.format")
            return


def begins_as_squad(file: Path) -> bool:
    """Return whether a JSON file is in SQuAD's format, judged by its beginning."""
    with opened(file) as text:
        head = text.read(2**16)
    return head.lstrip().startswith("{") and '"paragraphs"' in head and '"qas"' in head


def _is_conllu(file: Path) -> bool:
    """Return whether the first word of a file has the ten fields of CoNLL-U, a number first."""
    with opened(file) as text:
        lines = itertools.islice(lines_of(text, file), ROWS)
        words = (line.split("\t") for line in lines if line.strip() and not line.startswith("#"))
        first = next(words, [])
    return len(first) == 10 and first[0].partition("-")[0].isdigit()


def _has_records(file: Path, size: int) -> bool:
    """Return whether a file consists of records of this size."""
    return file.stat().st_size > 0 and file.stat().st_size % size == 0


_FORMATS: tuple[tuple[str, str, Callable[[Path], bool], str], ...] = (
    ("csv", ".tsv", has_quotes, "its fields are quoted as in CSV"),
    ("csv", ".txt", has_quotes, "it has tabs, and its fields are quoted as in CSV"),
    ("tsv", ".txt", has_tabs, "its lines have tabs"),
    ("conllu", ".conll", _is_conllu, "its words have ten fields"),
    ("squad", ".json", begins_as_squad, "it has paragraphs and qas"),
    ("cifar10", ".bin", partial(_has_records, size=3073), "by its size"),
    ("cifar100", ".bin", partial(_has_records, size=3074), "by its size"),
)
"""Formats by the ending of a file and a test of its content, with the reason."""


def _guess_header(
    path: str,
    guessed: Guess,
    options: dict[str, Any],
    kind: str | None,
    usual: list[str] | None = None,
) -> None:
    """Guess the columns of a table without a header: the `usual` names, if it has as many columns."""
    file = _sample(path)
    if file is None:
        return
    format = guessed.format(options) or SUFFIXES.get(suffix(file))
    if format == "conll" and usual is not None and "header" not in options:
        guessed.data["header"] = usual  # such files have no heading
    if format not in ("csv", "tsv"):
        return
    rows, delimiter = first_records(file, format, ROWS)
    if format == "csv" and delimiter != ",":
        name = "tab" if delimiter == "\t" else repr(delimiter)
        guessed.explain("delimiter", name, "which its first lines have", "--data.format")
    if "header" in options:
        return
    if usual is not None and rows and len(rows[0]) == len(usual) and not is_heading(rows):
        guessed.data["header"] = usual
        return
    if len({*map(len, rows)}) != 1 or len(rows) < 2:
        return  # an error that the reader reports
    _check_title(path, rows)
    if is_heading(rows):
        return
    header = content_roles(rows, kind)
    if kind is not None and not {*KINDS.get(kind, ())} <= {*(header or ())}:
        return  # the reader reports the missing column
    if header is None:
        raise InputError(
            f"--data {path}: the first line has no column names, and the {len(rows[0])} columns cannot be "
            f"guessed from {quote(rows[0])}; name them with --data.header '[text,label]'"
        )
    guessed.data["header"] = header
    guessed.explain("columns", ", ".join(header), "the first line has no column names", "--data.header")


def _check_title(path: str, rows: list[list[str]]) -> None:
    """Raise `InputError` if the names of the columns are below other lines, such as a title."""
    if has_usual_names(rows[0]):
        return
    for number, row in enumerate(rows[1:HEADING], 1):
        if has_usual_names(row, least=2):
            raise InputError(
                f"--data {path}: {quote(row)} are probably the column names, below {quote(rows[0])}; remove "
                f"the {'line' if number == 1 else 'lines'} above them, or if all are data, name the columns "
                "with --data.header"
            )


def _guess_columns(path: str, guessed: Guess, options: dict[str, Any], kind: str | None) -> None:
    stated = options.get("columns") or {}
    header = options.get("header") or guessed.data.get("header")
    format = guessed.format(options)
    row = next(open_source(path, "train", format, header), None)
    if row is None:
        return  # the reader reports the empty source
    names = [name for name, value in row.items() if not is_number_of_row(name, value)] + [*stated]
    wanted = (
        kind if kind in KINDS else "translate" if kind in ("tlm", "summarize") else "lm" if kind else None
    )
    answer = roles(names, wanted)
    unclear = answer is None or (kind is None and answer[0] == "lm" and answer[1]["text"].lower() != "text")
    if kind in CHAT_TASKS:
        guessed.kind = kind
        return
    if unclear and not stated and wanted in (None, "lm", "translate"):
        hint = chat_hint(row)
        if hint is not None:
            raise InputError(f"--data {path}: {hint}")
    if answer is None:
        if kind is not None:
            guessed.kind = kind  # the reader reports the missing column
            return
        raise _unclear_columns(path, [name for name in names if not is_unnamed(name)] or names)
    guessed.kind, columns = kind or answer[0], answer[1]
    other = {role: name for role, name in columns.items() if role not in (name, *stated)}
    if other:
        guessed.data["columns"] = other
        said = ", ".join(f"{name} as {role}" for role, name in other.items())
        guessed.explain("columns", said, "by their names", "--data.columns")
    if kind is None:
        guessed.explain("task", guessed.kind, f"it has {' and '.join(columns)}", "--task.kind")


def _guess_chats(path: str, guessed: Guess, options: dict[str, Any]) -> bool:
    """Guess the task of chats, instructions or preferences; return whether the first row has such a form."""
    header = options.get("header") or guessed.data.get("header")
    row = next(open_source(path, "train", guessed.format(options), header), {})
    form, used = form_of(row) or ("", [])
    if not form or roles([*row], "qa") is not None:
        return False
    if form == UNPAIRED:
        raise InputError(f"--data {path}: {chat_hint(row)}")
    guessed.kind = CHAT_TASKS[form == "preferences"]
    why = f"{' and '.join(used)} are {form}" if len(used) > 1 else f"{used[0]} has {form}"
    guessed.explain("task", guessed.kind, why, "--task.kind")
    return True


def _guess_unanswerable(path: str, guessed: Guess, options: dict[str, Any]) -> None:
    columns = {**guessed.data.get("columns", {}), **(options.get("columns") or {})}
    answers = columns.get("answers", "answers")
    if guessed.kind == "qa" and _lacks_answers(path, guessed.format(options), answers):
        guessed.task = {**guessed.task, "unanswerable": True}
        guessed.explain("unanswerable", "true", "some questions have no answer", "--task.unanswerable")


def _unclear_columns(path: str, names: list[str]) -> InputError:
    spoken = languages(names)
    task, roles = "classify", ("text", "label")
    example = [*names[:2], "B"]
    if len(spoken) > 1:
        task, roles, example = "translate", ("source", "target"), spoken
    columns = ", ".join(f"{role}: {_in_yaml(name)}" for role, name in zip(roles, example))
    return InputError(
        f"--data {path}: cannot tell what its columns are, which are {', '.join(map(quote, names))}; say "
        f"the task and its columns, as in --task.kind {task} --data.columns '{{{columns}}}'"
    )


def _in_yaml(name: str) -> str:
    """Return a name in a YAML mapping, in quotes if it would be a number or several values."""
    try:
        return name if parse_yaml(f"{{name: {name}}}", name) == {"name": name} else json.dumps(name)
    except InputError:
        return json.dumps(name)


def _lacks_answers(path: str, format: str | None, column: str) -> bool:
    """Return whether a question has no answer: of SQuAD's files any, of others one of the first rows."""
    rows = open_source(path, "train", format)
    answers = (row.get(column) for row in (rows if format in ARTICLES else itertools.islice(rows, ROWS)))
    return any(isinstance(answer, dict) and answer.get("text") == [] for answer in answers)


def _guess_parts(path: str, guessed: Guess, options: dict[str, Any]) -> None:
    """Find a column that says whether a row is for training, validation or test."""
    if _sample(path) is None or (COLUMN in options and options[COLUMN] is None):
        return
    reading = path, "train", guessed.format(options), options.get("header") or guessed.data.get("header")
    names = next(open_source(*reading), {})
    used = {**guessed.data.get("columns", {}), **(options.get("columns") or {})}.values()
    usual = (name for name in names if name.strip().lower() == COLUMN and name not in used)
    column = options.get(COLUMN) or next(usual, None)
    parts = named_parts(open_source(*reading), column, f"--data {path}") if column in names else []
    if not parts:
        return
    guessed.data[COLUMN] = column
    for role in {*parts[1:]} - {*options, *guessed.data}:
        guessed.data[role] = path
    if "test" in parts and options.get("test_fraction"):
        guessed.data["test_fraction"] = 0  # of the usual options of the task
    guessed.explain("split", ", ".join(parts), f"by the column {quote(column)}", "--data.split null")


def _guess_validation(path: str, guessed: Guess, options: dict[str, Any]) -> None:
    """Find validation files next to a file named train, or plan to hold out rows."""
    name = Path(path).name
    if not path.startswith(("hub:", PREFIX)) and name.startswith("train."):
        labelled = ("validation",) if guessed.format(options) in BENCHMARKS else ("validation", "test")
        for role in labelled:
            beside = [other + name.removeprefix("train") for other in SPLITS[role]]
            there = [name for name in beside if are_files(str(Path(path).with_name(name)))]
            if there and role not in options:
                guessed.data[role] = str(Path(path).with_name(there[0]))
    for role in ("validation", "test"):
        by_column = COLUMN in guessed.data and guessed.data.get(role) == path
        if role in guessed.data and not by_column:
            guessed.explain(role, Path(guessed.data[role]).name, "by its name", f"--data.{role}")
    if "validation" not in {*options, *guessed.data} and not has_validation(path):
        share = options.get("validation_fraction", 0.05)
        whole = ""
        format = guessed.format(options)
        apart = {"together", "streaming"} & {*options}
        if format in ARTICLES and not apart and _several_articles(path, format):
            guessed.data["together"], whole = "article", ", whole articles"
        test = 0 if "test" in guessed.data else options.get("test_fraction", 0)
        shares = f"{_percent(share)} of its rows" + (f" (and {_percent(test)} as test)" if test else "")
        guessed.explain("validation", f"{shares}{whole}", "for it has none", "--data.validation")


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"


def _several_articles(path: str, format: str) -> bool:
    """Return whether there are several articles; a single article is split by questions."""
    names = (row["article"] for row in open_source(path, "train", format, None))
    first = next(names, None)
    return any(name != first for name in names)
