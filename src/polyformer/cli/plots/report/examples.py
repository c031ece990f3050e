"""The section of examples of a report: for each kind of task a function that shows what its model does.

The rows are validation rows: test rows that were looked at would no longer be unseen.
"""

from collections.abc import Callable

from polyformer.cli.plots.report.answers import answers, choices, numbers
from polyformer.cli.plots.report.completed import completed_images
from polyformer.cli.plots.report.continued import continued_texts
from polyformer.cli.plots.report.held import HeldOutRows
from polyformer.cli.plots.report.mistakes import mistakes
from polyformer.cli.plots.report.pairs import extracts, mixture, summaries, translations
from polyformer.cli.plots.report.tagged import tagged_sentences
from polyformer.training.tasks import (
    Extraction,
    ImageModelling,
    LanguageModelling,
    MultipleChoice,
    PairRegression,
    QuestionAnswering,
    SingleLabelTask,
    Summarization,
    Tagging,
    Task,
    TextToText,
    Translation,
)

EXAMPLES: tuple[tuple[type[Task], Callable[[HeldOutRows], str]], ...] = (
    (Translation, translations),
    (Summarization, summaries),
    (Extraction, extracts),
    (TextToText, mixture),
    (SingleLabelTask, mistakes),
    (MultipleChoice, choices),
    (PairRegression, numbers),
    (Tagging, tagged_sentences),
    (QuestionAnswering, answers),
    (LanguageModelling, continued_texts),
    (ImageModelling, completed_images),
)
"""The section of each kind of task; the first kind that fits is used."""


def examples(held: HeldOutRows) -> str:
    """Return the section of the run's task; "" for a task without examples, and without validation rows."""
    functions = [function for kind, function in EXAMPLES if isinstance(held.task, kind)]
    return functions[0](held) if functions and held.rows else ""
