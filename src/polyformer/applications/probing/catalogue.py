"""The tasks of RULER by its names, for prompts of one length, and the text that some of them read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from polyformer.applications.probing.base import ProbeTask
from polyformer.applications.probing.common_words import CommonWords
from polyformer.applications.probing.frequent_words import FrequentWords
from polyformer.applications.probing.needles import Needles
from polyformer.applications.probing.questions import DistractedQuestions
from polyformer.applications.probing.variables import VariableTracking
from polyformer.core.errors import InputError, unknown
from polyformer.data.formats.guess import begins_as_squad
from polyformer.data.sources.origins import open_source, source_name
from polyformer.data.sources.splits import are_answers

WORDS = 2**20
"""The most words of a text that are used."""


@dataclass(frozen=True)
class ProbeText:
    """The text around needles, as `words`, and the questions about its `paragraphs`, if there are any."""

    words: Sequence[str]
    rows: Sequence[dict[str, Any]] = ()
    paragraphs: Sequence[str] = ()


def read_text(path: str | None, format: str | None = None) -> ProbeText:
    """Read the column `text` of a file, or `context`, `question` and `answers` of questions as in SQuAD.

    None is the default text. Raises `InputError` for a file with neither.
    """
    if format is None and path is not None and Path(path).suffix == ".json" and Path(path).is_file():
        format = "squad" if begins_as_squad(Path(path)) else None
    texts: dict[str, None] = {}
    rows: list[dict[str, Any]] = []
    for row in open_source(path, "test", format):
        text = row.get("context", row.get("text"))
        if not isinstance(text, str):
            raise InputError(
                f"{source_name(path)}: expected a column 'text', or 'question', 'context' and 'answers' as "
                f"in SQuAD, got {', '.join(map(repr, row)) or 'none'}"
            )
        texts[text] = None
        answers = row.get("answers")
        if (
            isinstance(answers, dict)
            and are_answers(answers)
            and answers["text"]
            and isinstance(row.get("question"), str)
        ):
            rows.append(row)
    words = list(islice((word for text in texts for word in text.split()), WORDS))
    if not words:
        raise InputError(f"{source_name(path)}: empty; there is no text in it")
    return ProbeText(words, rows, list(texts) if rows else ())


TASKS: Mapping[str, Callable[[int, ProbeText], ProbeTask]] = {
    "niah_single_1": lambda length, text: Needles("noise"),
    "niah_single_2": lambda length, text: Needles("text", text.words),
    "niah_single_3": lambda length, text: Needles("text", text.words, value_kind="uuids"),
    "niah_multikey_1": lambda length, text: Needles("text", text.words, keys=4),
    "niah_multikey_2": lambda length, text: Needles("needles"),
    "niah_multikey_3": lambda length, text: Needles("needles", key_kind="uuids", value_kind="uuids"),
    "niah_multivalue": lambda length, text: Needles("text", text.words, values=4),
    "niah_multiquery": lambda length, text: Needles("text", text.words, keys=4, queries=4),
    "vt": lambda length, text: VariableTracking(),
    "cwe": lambda length, text: CommonWords(*_occurrences(length)),
    "fwe": lambda length, text: FrequentWords(vocabulary=max(10, length // 50)),
    "qa": lambda length, text: DistractedQuestions(text.rows, text.paragraphs),
}
"""By RULER's name: a function from the length of prompts in tokens and the text to the task."""


def _occurrences(length: int) -> tuple[int, int]:
    """Return how often common and other words occur: less often in prompts that are shorter than RULER's."""
    return (30, 3) if length >= 4096 else (6, 1) if length >= 1024 else (4, 1)


def task_names(text: ProbeText) -> list[str]:
    """Return the tasks that are possible with a text: `qa` needs questions."""
    return [name for name in TASKS if name != "qa" or text.rows]


def find_task(name: str, length: int, text: ProbeText) -> ProbeTask:
    """Return the task of a name; raise `InputError` for an unknown name, and for `qa` without questions."""
    if name not in TASKS:
        raise unknown("task", name, TASKS)
    if name not in task_names(text):
        raise InputError(
            "tasks: 'qa' needs questions about a text; name a file in SQuAD's format with --text"
        )
    return TASKS[name](length, text)
