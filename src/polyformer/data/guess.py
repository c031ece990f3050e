"""What a path is, guessed: its format, its columns, what to validate with, and so which task it is for.

Only the first rows are looked at. What was guessed is said, a line each with the option that says otherwise;
what cannot be guessed is asked for by the option's name.
"""

import csv
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polyformer.core.errors import InputError, quote
from polyformer.data.columns import KINDS, content_roles, is_heading, roles
from polyformer.data.folders import has_images, label_folders
from polyformer.data.formats import SUFFIXES
from polyformer.data.opening import lines_of, opened
from polyformer.data.origins import SPLITS, has_validation, is_saved, open_source

ROWS = 500
"""So many rows are looked at."""


@dataclass
class Guess:
    """The `data` part of a recipe, the kind of the task, and a line for each thing that was guessed."""

    data: dict[str, Any]
    kind: str = "lm"
    said: list[str] = field(default_factory=list)

    def say(self, what: str, value: object, why: str, option: str) -> None:
        self.said.append(f"guessed {what}: {value}, {why} ({option})")


def guess(path: str, given: dict[str, Any], kind: str | None = None) -> Guess:
    """What `path` holds. `given`: options of the data that the user states; `kind`: a task that is stated.

    Raises `InputError` where the columns are for no task, with the options that say what they are.
    """
    found = Guess({"path": path})
    if not path.startswith("hub:") and Path(path).is_dir() and not is_saved(Path(path)):
        _look_into(Path(path), found)
    path = found.data["path"]
    _guess_format(path, found, given)
    if "header" not in given:
        _guess_header(path, found, given, kind)
    _guess_columns(path, found, given, kind)
    _guess_validation(path, found, given)
    return found


def _look_into(folder: Path, found: Guess) -> None:
    """A directory of files: those to train on, by the usual names of splits, else all of one kind."""
    if label_folders(folder) or has_images(folder):
        return
    parts = {
        split: [one for name in names for one in [folder / name] if one.is_dir()]
        for split, names in SPLITS.items()
    }
    if any(label_folders(one) or has_images(one) for ones in parts.values() for one in ones):
        if parts["test"]:
            found.data["test"] = str(folder)
        return
    files = sorted(one for one in folder.iterdir() if one.is_file() and not one.name.startswith("."))
    named = {split: _of_split(files, names) for split, names in SPLITS.items()}
    for role, split in (("path", "train"), ("validation", "validation"), ("test", "test")):
        if named["train"] and named[split]:
            found.data[role] = _one_source(named[split])
    if named["train"]:
        found.say("files", Path(found.data["path"]).name, "by their names", "--data FILE")
        return
    kinds = {_suffix(one) for one in files}
    if len(files) == 2 and len({one.name.partition(".")[0] for one in files}) == 1:
        found.data["path"] = _one_source(files)
    elif len(kinds) == 1 and kinds <= SUFFIXES.keys():
        found.data["path"] = str(files[0]) if len(files) == 1 else f"{folder}/*{''.join(files[0].suffixes)}"
    else:
        names = ", ".join(one.name for one in sorted(folder.iterdir())[:6]) or "nothing"
        raise InputError(
            f"--data {folder}: cannot tell what to train on in this directory, which has {names}; name a "
            "file, a pattern such as 'DIR/*.txt', or two parallel files as 'DIR/train.{en,vi}'"
        )
    found.say("files", Path(found.data["path"]).name, "all that are there", "--data FILE")


def _holds_rows(folder: Path) -> bool:
    return folder.is_dir() and bool(label_folders(folder) or has_images(folder))


def _of_split(files: Sequence[Path], names: Sequence[str]) -> list[Path]:
    for name in names:
        if chosen := [one for one in files if one.name.partition(".")[0] == name]:
            return chosen
    return []


def _one_source(files: Sequence[Path]) -> str:
    """A file, or two parallel ones as one pattern."""
    if len(files) == 1:
        return str(files[0])
    names = [one.name.removesuffix(".gz") for one in files]
    ends = [name.rpartition(".")[2] for name in names]
    packed = ".gz" if all(one.name.endswith(".gz") for one in files) else ""
    if len(files) != 2 or len(set(ends)) != 2:
        several = ", ".join(one.name for one in files[:6])
        raise InputError(
            f"--data {files[0].parent}: several files could be meant, {several}; name one "
            "parallel ones as 'DIR/train.{en,vi}'"
        )
    return str(files[0].parent / f"{names[0].rpartition('.')[0]}.{{{ends[0]},{ends[1]}}}{packed}")


def _suffix(path: Path | str) -> str:
    return Path(Path(path).name.removesuffix(".gz")).suffix.lower()


def _is_file(path: str) -> bool:
    return not path.startswith("hub:") and Path(path).is_file()


def _guess_format(path: str, found: Guess, given: dict[str, Any]) -> None:
    if "format" in given or not _is_file(path):
        return
    if _suffix(path) == ".txt" and _has_tabs(path):
        found.data["format"] = "tsv"
        found.say("format", "tsv", "its lines have tabs", "--data.format")
    elif _suffix(path) == ".json" and _begins_as_squad(path):
        found.data["format"] = "squad"
        found.say("format", "squad", "it has paragraphs and qas", "--data.format")
    elif _suffix(path) == ".bin" and (kind := _cifar(path)):
        found.data["format"] = kind
        found.say("format", kind, "by its size", "--data.format")


def _has_tabs(path: str) -> bool:
    """Whether each line has as many tabs as the first, and one at least."""
    with opened(Path(path)) as file:
        counts = {
            line.count("\t") for line in itertools.islice(lines_of(file, Path(path)), ROWS) if line.strip()
        }
    return len(counts) == 1 and min(counts) > 0


def _begins_as_squad(path: str) -> bool:
    with opened(Path(path)) as file:
        head = file.read(2**16)
    return head.lstrip().startswith("{") and '"paragraphs"' in head and '"qas"' in head


def _cifar(path: str) -> str | None:
    size = Path(path).stat().st_size
    return next(
        (kind for kind, record in (("cifar10", 3073), ("cifar100", 3074)) if size and size % record == 0),
        None,
    )


def _guess_header(path: str, found: Guess, given: dict[str, Any], kind: str | None) -> None:
    """The columns of a table whose first line is a row already."""
    format = given.get("format") or found.data.get("format") or SUFFIXES.get(_suffix(path))
    if format not in ("csv", "tsv") or not _is_file(path):
        return
    rows = list(itertools.islice(_fields(path, format), ROWS))
    if len({*map(len, rows)}) != 1 or len(rows) < 2 or is_heading(rows):
        return  # a heading, or what the reader will complain of
    header = content_roles(rows, kind)
    if kind is not None and not {*KINDS.get(kind, ())} <= {*(header or ())}:
        return  # the reader names the column that it misses
    if header is None:
        raise InputError(
            f"--data {path}: its first line is no heading, and what its {len(rows[0])} columns are cannot be "
            f"told from {quote(rows[0])}; name them with --data.header '[text,label]'"
        )
    found.data["header"] = header
    found.say("columns", ", ".join(header), "its first line is no heading", "--data.header")


def _fields(path: str, format: str) -> Iterator[list[str]]:
    with opened(Path(path)) as file:
        lines = lines_of(file, Path(path))
        try:
            yield from (
                csv.reader(lines) if format == "csv" else (line.rstrip("\r\n").split("\t") for line in lines)
            )
        except csv.Error:
            return  # the reader says what is wrong


def _guess_columns(path: str, found: Guess, given: dict[str, Any], kind: str | None) -> None:
    stated = given.get("columns") or {}
    header = given.get("header") or found.data.get("header")
    format = given.get("format") or found.data.get("format")
    row = next(open_source(path, "train", format, header), None)
    if row is None:
        return  # the reader says that there is nothing
    names = [*row, *stated]
    wanted = kind if kind in KINDS else "translate" if kind == "tlm" else "lm" if kind else None
    answer = roles(names, wanted)
    if answer is None:
        if kind is not None:
            found.kind = kind  # the reader names the column that it misses
            return
        columns = ", ".join(map(quote, names))
        example = f"'{{text: {names[0]}, label: B}}'"
        raise InputError(
            f"--data {path}: cannot tell what its columns are, which are {columns}; say the task and its "
            f"columns, as in --task.kind classify --data.columns {example}"
        )
    found.kind, columns = kind or answer[0], answer[1]
    other = {role: name for role, name in columns.items() if role not in (name, *stated)}
    if other:
        found.data["columns"] = other
        said = ", ".join(f"{name} as {role}" for role, name in other.items())
        found.say("columns", said, "by their names", "--data.columns")
    if kind is None:
        found.say("task", found.kind, f"it has {' and '.join(columns)}", "--task.kind")


def _guess_validation(path: str, found: Guess, given: dict[str, Any]) -> None:
    """Files beside one called train, and whether rows are held out."""
    name = Path(path).name
    if not path.startswith("hub:") and name.startswith("train."):
        for role in ("validation", "test"):
            beside = [other + name.removeprefix("train") for other in SPLITS[role]]
            there = [one for one in beside if _exists(str(Path(path).with_name(one)))]
            if there and role not in given:
                found.data[role] = str(Path(path).with_name(there[0]))
    for role in ("validation", "test"):
        if role in found.data:
            found.say(role, Path(found.data[role]).name, "by its name", f"--data.{role}")
    if "validation" not in {*given, *found.data} and not has_validation(path):
        share = given.get("validation_fraction", 0.05)
        found.say("validation", f"{share:.0%} of its rows", "for it has none", "--data.validation")


def _exists(path: str) -> bool:
    head, brace, rest = path.partition("{")
    inside, _, tail = rest.partition("}")
    return (
        all(Path(head + one + tail).is_file() for one in inside.split(",")) if brace else Path(path).is_file()
    )
