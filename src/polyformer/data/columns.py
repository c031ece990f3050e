"""Roles of the columns of a table, inferred from their names or their content.

A task reads columns by their roles: text and label, source and target, and so on. `roles` infers them from
names that are usual in data sets; `content_roles` infers them for a table without a header.
"""

import re
from collections.abc import Sequence

from polyformer.data.choices import columns_of_choices

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
_LANGUAGES = {*_LANGUAGE_CODES.split()}

_CREDIT = re.compile(r"attribution|CC[- ]BY", re.IGNORECASE)  # next to the sentences of Tatoeba
_ID = re.compile(r"[\w.:-]{0,39}\d[\w.:-]{0,40}")  # a number, or a short word with a digit


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
            spoken = [name for name in names if name.lower() in _LANGUAGES]
            columns = dict(zip(needed, spoken)) if len(spoken) == 2 else {}
        if len(columns) == len(needed):
            return task, columns
    return None


def is_heading(rows: Sequence[Sequence[str]]) -> bool:
    """Return whether the first of `rows` contains the names of the columns."""
    first, *others = rows
    if len(set(first)) < len(first) or not all(first):
        return False
    known = {name for names in _NAMES.values() for name in names.split()} | {
        name for pair in _PAIRS for name in pair
    }
    if any(name.strip().lower() in known | _LANGUAGES for name in first):
        return True
    # A header above a column of labels usually differs from all labels.
    labels = [i for i in range(len(first)) if _are_labels([row[i] for row in others])]
    return any(first[i] not in {row[i] for row in others} and not first[i].isdigit() for i in labels)


def content_roles(rows: Sequence[Sequence[str]], kind: str | None = None) -> list[str] | None:
    """Return the roles of the columns of `rows` without a header, by their content; None if unclear.

    Row numbers and credits are named `id` and `credit`. If several columns could be the label of one text
    (IMDB has a rating too), the column with the fewest values is chosen; the others become `other0`, ...
    """
    columns = list(zip(*rows))
    names = [_beside(column) for column in columns]
    shown = [i for i, name in enumerate(names) if name is None]
    labels = [i for i in shown if _are_labels(columns[i])]
    texts = [i for i in shown if i not in labels]
    if len(labels) > 1 and len(texts) == 1 and kind in (None, "classify"):
        by_values = sorted(labels, key=lambda i: len({*columns[i]}))
        if len({*columns[by_values[0]]}) < len({*columns[by_values[1]]}):
            labels = by_values[:1]
    if (len(texts), len(labels)) == (2, 0) or (kind == "translate" and len(shown) == 2):
        roles = dict(zip(shown, ("source", "target")))
    elif len(labels) == 1 and len(texts) in (1, 2):
        roles = {labels[0]: "label", **dict(zip(texts, ("text", "pair")))}
    elif (len(texts), len(labels)) == (1, 0):
        roles = {texts[0]: "text"}
    else:
        return None
    return [roles.get(i) or f"{names[i] or 'other'}{i}" for i in range(len(columns))]


def _beside(column: Sequence[str]) -> str | None:
    """Return the kind of a column that no task reads: `credit`, `id`; None for others."""
    if all(map(_CREDIT.search, column)):
        return "credit"
    if len(column) > 1 and len(set(column)) == len(column) and all(map(_ID.fullmatch, column)):
        return "id"
    return None


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
