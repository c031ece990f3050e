"""Questions and demonstrations from files, and their split."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from polyformer.core.errors import InputError, quote
from polyformer.data.formats.readers import read_lines
from polyformer.data.sources.origins import existing_file, open_source, source_name

ROLES = "input", "target", "choices"
BETWEEN = "|"
"""Separates the choices of a row that are given as one text, as in CSV files."""


@dataclass(frozen=True)
class Example:
    """A question, its answer if known, and the answers to choose from, if any."""

    input: str
    target: str | None = None
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sources:
    """Options for reading files.

    format, header: as for every source (`polyformer.data`). columns: names of the columns of input, target
    and choices if they differ from these. words: replacements of the targets in a file. choices: choices of
    rows that have none.
    """

    format: str | None = None
    header: tuple[str, ...] | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)
    choices: tuple[str, ...] = ()


def read_examples(path: str, sources: Sources) -> list[Example]:
    """Read the rows of a file. A plain text has a question in each line, and its answer after a tab.

    Raises `InputError` that names the row: for a question without text, a target that is not among the
    choices, a single choice, or a repeated choice.
    """
    rows = list(_rows(path, sources))
    if not rows:
        raise InputError(f"{source_name(path)}: empty; there is no question in it")
    return [_example(row, f"{path}, row {number}", sources) for number, row in enumerate(rows, 1)]


def split_examples(
    rows: Sequence[Example], others: Sequence[Example] | None, shots: int, limit: int | None, seed: int
) -> tuple[list[Example], list[Example]]:
    """Return (demonstrations, questions), both sampled with `seed`.

    More shots extend the same demonstrations. Demonstrations are rows with a target, from `others` if given,
    else from `rows`; they never contain a question. At most `limit` questions are chosen, in the order of the
    file; if there are enough rows, they do not depend on the number of shots. Raises `InputError` for fewer
    rows than shots.
    """
    order = np.random.default_rng(seed).permutation(len(rows)).tolist()
    asked = {row.input for row in rows}
    if others is None:
        candidates = [row for row in order[::-1] if rows[row].target is not None]
        chosen, demonstrations = candidates[:shots], [rows[row] for row in candidates[:shots]]
        repeated = {row.input for row in demonstrations}
        order = [row for row in order if row not in {*chosen} and rows[row].input not in repeated]
    else:
        drawn = np.random.default_rng(seed).permutation(len(others)).tolist()
        free = [others[row] for row in drawn if others[row].target is not None]
        candidates = [row for row in free if row.input not in asked]
        demonstrations = candidates[:shots]
    if len(demonstrations) < shots:
        raise InputError(
            f"shots: expected at most {len(candidates)}, the number of rows with a target that are not among "
            f"the questions, got {shots}; use fewer, or more rows with --examples FILE"
        )
    questions = sorted(order[:limit])
    if not questions:
        raise InputError(
            f"shots: {shots} of {len(rows)} rows leave no question; name other rows with --examples FILE"
        )
    return demonstrations, [rows[row] for row in questions]


def _rows(path: str, sources: Sources) -> Iterator[dict[str, Any]]:
    plain = sources.format is None and sources.header is None and not path.startswith("hub:")
    if not plain or Path(path.removesuffix(".gz")).suffix != ".txt":
        yield from open_source(path, "test", sources.format, sources.header)
        return
    for row in read_lines(existing_file(path)):
        question, tab, answer = row["text"].partition("\t")
        yield {"input": question, **({"target": answer} if tab else {})}


def _example(row: Mapping[str, Any], where: str, sources: Sources) -> Example:
    column = sources.columns.get("input", "input")
    if column not in row:
        raise InputError(
            f"{where}: no column {quote(column)}; it has {', '.join(map(quote, row)) or 'none'}; name the "
            "column of the question with --columns '{input: NAME}', or all columns with "
            "--header '[input, target]'"
        )
    values = {role: row.get(sources.columns.get(role, role)) for role in ROLES}
    target = values["target"]
    if isinstance(target, list | dict):
        raise InputError(f"{where}: expected a text as its target, got {quote(target)}")
    example = Example(
        _text(values["input"], where),
        None if target is None or target == "" else _worded(str(target), where, sources.words),
        _choices(values["choices"], where) or sources.choices,
    )
    if example.choices and example.target is not None and example.target not in example.choices:
        names = ", ".join(map(quote, example.choices))
        raise InputError(f"{where}: the target {quote(example.target)} is not among the choices {names:.400}")
    return replace(example, choices=checked_choices(example.choices, where))


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str | int | float) or not str(value).strip():
        raise InputError(f"{where}: expected a text as its input, got {quote(value)}")
    return str(value)


def _worded(target: str, where: str, words: Mapping[str, str]) -> str:
    if words and target not in words:
        raise InputError(f"{where}: --targets has no word for {quote(target)}")
    return words.get(target, target)


def _choices(value: Any, where: str) -> tuple[str, ...]:
    if value is None or value == "":
        return ()
    parts = value.split(BETWEEN) if isinstance(value, str) else value
    if not isinstance(parts, list) or not all(isinstance(part, str | int | float) for part in parts):
        raise InputError(
            f"{where}: expected choices as a list, or separated by {BETWEEN}, got {quote(value)}"
        )
    return tuple(str(part).strip() for part in parts)


def checked_choices(choices: tuple[str, ...], where: str) -> tuple[str, ...]:
    """Return `choices` if they are none, or two and more different texts; raise `InputError` otherwise."""
    if choices and (len({*choices}) < max(2, len(choices)) or not all(choices)):
        raise InputError(f"{where}: expected two or more different choices, got {quote(list(choices))}")
    return choices
