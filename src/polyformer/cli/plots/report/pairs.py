"""Examples of tasks that generate a text from a text: source, reference and output with a score."""

import dataclasses
import html
from collections.abc import Callable, Sequence
from functools import partial

from polyformer.cli.plots.report.held import HeldOutRows, ranked, rule
from polyformer.cli.plots.report.page import section
from polyformer.cli.plots.report.texts import example_table, number_cell, text_cell
from polyformer.data.formats.questions_and_summaries import rouge
from polyformer.training.recipes.report import number
from polyformer.training.tasks.text_to_text import measured

Write = Callable[[Sequence[str]], list[str]]
"""Returns the output of the model for each source."""


@dataclasses.dataclass(frozen=True)
class Form:
    """A form of text to text: the name of the score of an output, and its function of output and reference.

    metrics: the names of the metrics of `measured` that are shown.
    """

    score: str
    of: Callable[[str, str], float]
    metrics: tuple[str, ...]


def sentence_bleu(text: str, reference: str) -> float:
    """Return sacrebleu's BLEU of a sentence, 0 to 100."""
    import sacrebleu

    return sacrebleu.sentence_bleu(text, [reference]).score


def rouge_l(text: str, reference: str) -> float:
    """Return the F1 of ROUGE-L of a text, 0 to 100."""
    return rouge([text], [reference])["rougeL"]


def equal(text: str, reference: str) -> float:
    """Return 100 for the reference, otherwise 0."""
    return 100.0 * (text == reference)


FORMS = {
    "translate": Form("sentence BLEU", sentence_bleu, ("bleu",)),
    "summarize": Form("ROUGE-L", rouge_l, ("rouge1", "rouge2", "rougeL")),
    "classify": Form("exact match", equal, ("accuracy",)),
}
"""The forms of text to text, by the names of `MixturePart.form`."""


def translations(held: HeldOutRows) -> str:
    """Return translations of sources with BLEU of each."""
    return _section(held, [compared(held, "translate", partial(held.task.translate, held.model))])


def summaries(held: HeldOutRows) -> str:
    """Return generated summaries with ROUGE of each."""
    return _section(held, [compared(held, "summarize", partial(held.task.translate, held.model))])


def extracts(held: HeldOutRows) -> str:
    """Return the sentences that were chosen as summaries, with ROUGE of each."""
    return _section(held, [compared(held, "summarize", partial(held.task.extract, held.model))])


def mixture(held: HeldOutRows) -> str:
    """Return the outputs for the parts of a mixture that have references, each by its own score."""
    write = partial(held.task.translate, held.model)
    parts = []
    for name, rows in held.task.grouped(held.rows).items():
        form = held.task.config.parts[name].form
        if rows and form in FORMS:
            part = dataclasses.replace(held, rows=rows)
            parts.append(f"<h3>{html.escape(name)}</h3>{compared(part, form, write, f'{name}_')}")
    return _section(held, parts) if parts else ""


def compared(held: HeldOutRows, form: str, write: Write, prefix: str = "") -> str:
    """Return the table of the rows, and the metrics of the whole corpus.

    prefix: of the names of the metrics in run.json. Without a metric there, it is computed for the rows that
    are read here.
    """
    kind, rows = FORMS[form], held.first
    sources, references = ([row[name] for row in rows] for name in ("source", "target"))
    outputs = write(sources)
    scores = [kind.of(*pair) for pair in zip(outputs, references, strict=True)]
    recorded = {name: held.scores.get(prefix + name) for name in kind.metrics}
    where = "all validation rows, from run.json"
    if any(value is None for value in recorded.values()):
        recorded, where = measured(form, outputs, references), f"{held.extent} validation rows"
    corpus = ", ".join(f"{name} {number(recorded[name] or 0.0)}" for name in kind.metrics)

    def cells(index: int) -> list[str]:
        texts = sources[index], references[index], outputs[index]
        return [*map(text_cell, texts), number_cell(scores[index])]

    columns = ["source", "reference", "output of the model", kind.score]
    said = f"Corpus: {corpus} ({where}). Outputs are for {held.extent} validation rows. {rule(kind.score)}"
    return f'<p class="soft">{html.escape(said)}</p>{example_table(columns, ranked(scores), cells)}'


def _section(held: HeldOutRows, parts: Sequence[str]) -> str:
    text = "What the model makes of validation rows, beside the references."
    return section("Examples", text, *parts)
