"""Columns of a table by their use: choices, splits, and the roles that a task reads.

The choices of a row come from a list or from several columns, and a column may say which rows are for
training, validation and test. A task reads columns by their roles: text and label, source and target, and so
on. `roles` infers them from names that are usual in data sets; `content_roles` infers them for a table
without a header.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from polyformer.core.errors import InputError, quote
from polyformer.core.parsing import parse_json
from polyformer.data.formats.tables import Row

CHOICES = "choices"

_JOINED = ("text", CHOICES)
_NUMBERED = re.compile(r"(answer|choice|ending|option|sol|solution)[ _-]?(\d{1,2}|[a-f])")
_CONTEXTS = ("text", "context", "ctx", "passage", "article", "startphrase", "premise", "goal", "sentence")
_QUESTIONS = ("question", "query", "question_stem")
_LISTS = (CHOICES, "options", "endings", "candidates")
_LABELS = ("label", "labels", "answer", "answerkey", "answer_key", "correct", "correct_answer", "gold")


def columns_of_choices(names: Sequence[str]) -> dict[str, str]:
    """Return the columns of text, choices and label among `names`, by the usual names in data sets.

    Several columns for a role are separated by commas: for SWAG ending0,ending1,ending2,ending3, for RACE
    article,question.
    """
    lowered = {name.strip().lower(): name for name in reversed(names)}

    def first(names: Sequence[str]) -> list[str]:
        return [lowered[name] for name in names if name in lowered][:1]

    series: dict[str, list[tuple[int, str, str]]] = {}
    for low, name in lowered.items():
        if match := _NUMBERED.fullmatch(low):
            stem, place = match.groups()
            series.setdefault(stem, []).append((len(place), place, name))
    longest = max(series.values(), key=len, default=[])
    several = [name for _, _, name in sorted(longest)] if len(longest) > 1 else []
    usual = {
        "text": first(_CONTEXTS) + first(_QUESTIONS),
        CHOICES: first(_LISTS) or several,
        "label": first(_LABELS),
    }
    return {role: ",".join(columns) for role, columns in usual.items() if columns}


def with_choices(rows: Iterator[Row], columns: Mapping[str, str], source: str) -> Iterator[Row]:
    """Yield rows with a text and a list of choices.

    Several columns of a text are joined by spaces; several columns of choices become a list without trailing
    empty values. A single column of choices contains a list, as JSON in tables.
    """
    for number, row in enumerate(rows, 1):
        whole = dict(row)
        for role in _JOINED:
            column = columns.get(role, role)
            names = [name.strip() for name in column.split(",")]
            if column not in row and len(names) > 1 and all(name in row for name in names):
                values = ["" if row[name] is None else str(row[name]) for name in names]
                whole[column] = _without_end(values) if role == CHOICES else " ".join(filter(None, values))
        column = columns.get(CHOICES, CHOICES)
        if column in whole:
            where = f"{source}, row {number}: column {quote(column)}"
            whole[column] = listed(whole[column], where)
        yield whole


def listed(value: object, where: str) -> list[str]:
    """Return two or more choices from a list or JSON; raises `InputError` that begins with `where`."""
    if isinstance(value, str):
        value = parse_json(value, where, list, way_out='; expected a list of choices, as ["red", "green"]')
    if not isinstance(value, list) or not all(isinstance(choice, str) for choice in value):
        raise InputError(f"{where} holds {quote(value)}, expected a list of texts")
    if len(value) < 2:
        raise InputError(f"{where}: expected two choices or more, got {quote(value)}")
    return value


def right_choice(label: object, choices: Sequence[str], first: int) -> int:
    """Return the index, from 0, of the choice that `label` names.

    A label is the number (the first choice has number `first`), the letter (A for the first) or the text of a
    choice. Raises `InputError` for a label that matches no choice, or more than one.
    """
    text = str(label).strip()
    places = set()
    if text.isdecimal() and len(text) < 9:
        places.add(int(text) - first)
    if isinstance(label, str):
        if len(text) == 1 and text.isascii() and text.isalpha():
            places.add(ord(text.upper()) - ord("A"))
        places.update(place for place, choice in enumerate(choices) if choice.strip() == text)
    inside = [place for place in places if 0 <= place < len(choices)]
    if len(inside) == 1:
        return inside[0]
    numbers = f"{first} to {first + len(choices) - 1}"
    if inside:
        why = "which could be several of them"
    else:
        why = "none of them; task.first_number says what number the first choice has"
    raise InputError(
        f"label: expected the number ({numbers}), the letter or the text of one of the choices "
        f"{quote(list(choices))}, got {quote(label)}, {why}"
    )


def _without_end(values: list[str]) -> list[str]:
    """Return the values up to the last value that is not empty."""
    while values and not values[-1].strip():
        values = values[:-1]
    return values


COLUMN = "split"
"""The usual name of the column, in upper or lower case."""

PARTS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev", "development"),
    "test": ("test", "testing"),
}
"""The values for each part, in upper or lower case."""

FIRST = 500
"""Rows whose values decide whether the column names parts."""

_PART_OF = {value: part for part, values in PARTS.items() for value in values}


def part_of(value: object) -> str | None:
    """Return the part that a value names; None for any other value."""
    return _PART_OF.get(value.strip().lower()) if isinstance(value, str) else None


def named_parts(rows: Iterable[Row], column: str, source: str) -> list[str]:
    """Return the parts that the column names: at least two, with "train"; an empty list for another column.

    Reads all rows, or until all parts occur. Raises `InputError` if only some values are parts.
    """
    rows = iter(rows)
    values = [row.get(column) for row in itertools.islice(rows, FIRST)]
    if not any(map(part_of, values)):
        return []
    present: set[str] = set()
    for value in itertools.chain(values, (row.get(column) for row in rows)):
        part = part_of(value)
        if part is None:
            raise InputError(f"{source}: {_unknown(column, value)}")
        present.add(part)
        if len(present) == len(PARTS):
            break
    return [part for part in PARTS if part in present] if len(present) > 1 and "train" in present else []


def rows_of_part(rows: Iterable[Row], column: str, part: str, source: str) -> Iterator[Row]:
    """Yield the rows of a part; raises `InputError` for a missing column, another value, or no such row."""
    empty = True
    for number, row in enumerate(rows, 1):
        if column not in row:
            raise InputError(
                f"{source}, row {number}: no column {quote(column)}, which split names; it has "
                f"{', '.join(map(quote, row)) or 'none'}"
            )
        named = part_of(row[column])
        if named is None:
            raise InputError(f"{source}, row {number}: {_unknown(column, row[column])}")
        if named == part:
            empty = False
            yield row
    if empty:
        raise InputError(
            f"{source}: no row has {quote(part)} in the column {quote(column)}; name another "
            f"{part} source, or set split to null to use all rows"
        )


def _unknown(column: str, value: object) -> str:
    return (
        f"column {quote(column)} holds {quote(value)}, expected train, validation or test; correct the rows, "
        "or use all of them for training with --data.split null"
    )


KINDS: dict[str, tuple[str, ...]] = {
    "qa": ("question", "context", "answers"),
    "choose": ("text", "choices", "label"),
    "tag": ("tokens", "tags"),
    "classify_image": ("image", "label"),
    "image": ("image",),
    "act": ("observations", "actions", "rewards"),
    "translate": ("source", "target"),
    "classify_pair": ("text", "pair", "label"),
    "classify": ("text", "label"),
    "lm": ("text",),
}
"""The tasks that can be inferred, with the required roles; the first task with all its roles is chosen."""

_NAMES: dict[str, str] = {
    "text": "text sentence content review document article body comment message tweet utterance query",
    "label": "label labels class category sentiment topic intent is_duplicate gold_label rating stars",
    "source": "source src",
    "target": "target tgt translation",
    "tokens": "tokens words",
    "tags": "tags ner_tags pos_tags ner pos",
    "question": "question",
    "context": "context passage",
    "answers": "answers",
    "image": "image img picture",
    "observations": "observations states",
}

_PAIRS = (
    ("text", "pair"),
    ("text", "text2"),
    ("text1", "text2"),
    ("text_a", "text_b"),
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("premise", "hypothesis"),
    ("query", "passage"),
)
"""Usual names of two texts with one label: QQP, QNLI, MNLI, MRPC, ..."""

_LANGUAGE_CODES = """
ar bg bn ca cs da de el en es et fa fi fr gl he hi hr hu id is it ja ka kk km ko lt lv mk mn ms my ne nl
no pl ps pt ro ru si sk sl sq sr sv sw ta th tl tr uk ur uz vi xh yi zh zu ara ces deu eng fin fra heb
hin ind ita jpn kor nld pol por ron rus spa swe tha tur ukr vie zho
"""
_LANGUAGE_NAMES = """
arabic chinese czech danish dutch english finnish french german greek hebrew hindi hungarian indonesian
italian japanese khmer korean malay norwegian polish portuguese romanian russian spanish swahili swedish
tamil thai turkish ukrainian urdu vietnamese
"""
_LANGUAGES = {*_LANGUAGE_CODES.split(), *_LANGUAGE_NAMES.split()}
_REGION = re.compile(r"([A-Za-z]{2,3})([-_][A-Z]{2}|[-_][A-Z][a-z]{3}|-[a-z]{2})")  # en-US, eng_Latn, pt-br

_UNNAMED = re.compile(r"|Unnamed: \d+(_level_\d+)?(\.\d+)?|__index_level_\d+__")

_CREDIT = re.compile(r"attribution|CC[- ]BY", re.IGNORECASE)  # next to the sentences of Tatoeba
_ID = re.compile(r"[\w.:-]{0,39}\d[\w.:-]{0,40}")  # a number, or a short word with a digit
_FRACTION = re.compile(r"-?\d*\.(?!0+$)\d+")


_USUAL = {name for names in (*_NAMES.values(), *map(" ".join, _PAIRS)) for name in names.split()}
"""Usual names of columns."""


def roles(names: Sequence[str], kind: str | None = None) -> tuple[str, dict[str, str]] | None:
    """Return the task for columns with these `names` and the column of each role; None if no task fits.

    If `kind` is given, only that task is tried.
    """
    for task, needed in KINDS.items():
        if kind not in (None, task):
            continue
        columns = {role: column for role in needed if (column := _column(role, names)) is not None}
        if task == "choose":
            columns = columns_of_choices(names)
        if task == "classify_pair":
            columns = _pair(names) | ({"label": columns["label"]} if "label" in columns else {})
        if task == "translate" and len(columns) < 2:
            spoken = languages(names)
            columns = dict(zip(needed, spoken)) if len(spoken) == 2 else {}
        if len(columns) == len(needed):
            return task, columns
    return None


def is_unnamed(name: str) -> bool:
    """Return whether a column has no name, such as the index of pandas: empty, or `Unnamed: 0`."""
    return _UNNAMED.fullmatch(name.strip()) is not None


def is_heading(rows: Sequence[Sequence[str]]) -> bool:
    """Return whether the first of `rows` contains the names of the columns."""
    first, *others = rows
    columns = list(zip(*(row for row in others if row != first))) or [()] * len(first)
    # A name that also occurs below is a label: of languages, of kinds of texts.
    above = [name for name, column in zip(first, columns) if name not in column]
    if has_usual_names(above) or any(name.strip() and is_unnamed(name) for name in above):
        return True
    if _is_header_of_pandas(first, columns):
        return True
    shown = [i for i, name in enumerate(first) if name or any(columns[i])]
    names = [first[i] for i in shown]
    if len(set(names)) < len(names) or not all(names):
        return False
    # A header above a column of labels usually differs from all labels.
    labels = [i for i in shown if _are_labels(columns[i])]
    return any(first[i] not in {*columns[i]} and not _is_number(first[i]) for i in labels)


def has_usual_names(cells: Sequence[str], least: int = 1) -> bool:
    """Return whether at least `least` different cells are usual names of columns, or languages."""
    spoken = {*languages(cells)}
    if len(spoken) == 1:
        spoken = {
            cell for cell in spoken if len(cell) > 3 or not cell.istitle()
        }  # "Hi" and "No" are words too
    return len({cell.strip().lower() for cell in cells} & _USUAL | spoken) >= least


def _is_header_of_pandas(first: Sequence[str], columns: Sequence[Sequence[str]]) -> bool:
    """Return whether `first` is a header of columns without names, above the values `columns`.

    An empty cell is above row numbers, or the columns are numbered from 0.
    """
    if not first[0].strip() and _are_row_numbers(columns[0]):
        return True
    names = list(itertools.dropwhile(lambda cell: not cell.strip(), first))
    numbered = bool(names) and names == [str(number) for number in range(len(names))]
    return numbered and not all(cell.isdigit() for column in columns for cell in column)


def content_roles(rows: Sequence[Sequence[str]], kind: str | None = None) -> list[str] | None:
    """Return the roles of the columns of `rows` without a header, by their content; None if unclear.

    Row numbers and credits are named `id` and `credit`. If several columns could be the label of one text
    (IMDB has a rating too), the column with the fewest values is chosen; the others become `other0`, ...
    Numbers that are no labels may be scores or dates, and are unclear without a label.
    """
    columns = list(zip(*rows))
    names = [_without_role(column) for column in columns]
    shown = [i for i, name in enumerate(names) if name is None]
    labels = [i for i in shown if _are_labels(columns[i])]
    texts = [i for i in shown if i not in labels]
    numbers = [i for i in texts if _are_numbers(columns[i])]
    if kind not in ("lm", "translate") and numbers and not labels:
        return None
    texts = [i for i in texts if i not in numbers]
    if len(labels) > 1 and len(texts) == 1 and kind in (None, "classify"):
        by_values = sorted(labels, key=lambda i: len({*columns[i]}))
        if len({*columns[by_values[0]]}) < len({*columns[by_values[1]]}):
            labels = by_values[:1]
    if kind == "translate" and len(shown) == 2:
        roles = dict(zip(shown, ("source", "target")))
    elif (len(texts), len(labels)) == (2, 0):
        roles = dict(zip(texts, ("source", "target")))
    elif len(labels) == 1 and len(texts) in (1, 2):
        roles = {labels[0]: "label", **dict(zip(texts, ("text", "pair")))}
    elif (len(texts), len(labels)) == (1, 0):
        roles = {texts[0]: "text"}
    else:
        return None
    return [roles.get(i) or f"{names[i] or 'other'}{i}" for i in range(len(columns))]


def _without_role(column: Sequence[str]) -> str | None:
    """Return the kind of a column that no task reads: `empty`, `credit`, `id`; None for others."""
    if not any(column):
        return "empty"
    if all(map(_CREDIT.search, column)):
        return "credit"
    unique = len(column) > 1 and len(set(column)) == len(column)
    if unique and all(map(_ID.fullmatch, column)) and not any(map(_FRACTION.fullmatch, column)):
        return "id"
    return None


def _are_row_numbers(column: Sequence[str]) -> bool:
    return all(cell.isdigit() for cell in column) or _without_role(column) == "id"


def _are_numbers(column: Sequence[str]) -> bool:
    """Return whether most cells with content are numbers, dates or other values without a letter."""
    cells = [cell for cell in column if cell.strip()]
    return 2 * sum(map(_is_number, cells)) > len(cells)


def _is_number(cell: str) -> bool:
    if any(map(str.isdigit, cell)) and not any(map(str.isalpha, cell)):
        return True
    try:
        float(cell)
    except ValueError:
        return False
    return True


def languages(names: Sequence[str]) -> list[str]:
    """Return the names that are languages or their codes."""
    return [name for name in names if _is_language(name)]


def is_number_of_row(name: str, value: object) -> bool:
    """Return whether a column with the name of a language has numbers of rows: `id` is also Indonesian."""
    return _is_language(name) and not (isinstance(value, str) and _ID.fullmatch(value) is None)


def _is_language(name: str) -> bool:
    region = _REGION.fullmatch(name.strip())
    return (region[1] if region else name.strip()).lower() in _LANGUAGES


def _column(role: str, names: Sequence[str]) -> str | None:
    lowered = {name.strip().lower(): name for name in reversed(names)}
    return next((lowered[name] for name in _NAMES.get(role, role).split() if name in lowered), None)


def _pair(names: Sequence[str]) -> dict[str, str]:
    lowered = {name.strip().lower(): name for name in names}
    for first, second in _PAIRS:
        if first in lowered and second in lowered:
            return {"text": lowered[first], "pair": lowered[second]}
    return {}


def _are_labels(column: Sequence[str]) -> bool:
    """Return whether there are few different short values, each repeated on average."""
    different = set(column)
    return len(different) <= min(100, len(column) / 2) and all(len(value) <= 40 for value in different)
