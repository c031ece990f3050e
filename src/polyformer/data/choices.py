"""Multiple choice: the choices of a row, from a list or from several columns, and the correct choice."""

import re
from collections.abc import Iterator, Mapping, Sequence

from polyformer.core.errors import InputError, quote
from polyformer.core.parsing import parse_json
from polyformer.data.tables import Row

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
