"""The section of examples of a report: for each kind of task a function that shows what its model does.

The rows are validation rows: test rows that were looked at would no longer be unseen.

    text to text        source, reference and output with a score
    language models     texts of the validation data, continued by the model and as they continue
    models of pixels    images, what the model reads of them, and what it generates
    tagging             sentences with their words coloured by right and wrong tags
    answers, choices    right answers and predictions, also of regression

Texts from data are hostile input, so every text is escaped and has its own direction.
"""

import dataclasses
import html
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate

import numpy as np
import torch

from polyformer.cli.plots.report.mistakes import HeldOutRows, image_element, mistakes, ranked, rule
from polyformer.cli.plots.report.page import figure, section
from polyformer.data.formats.columns import right_choice
from polyformer.data.formats.published import f1, rouge
from polyformer.models.generation import GenerationConfig, SamplingConfig
from polyformer.training.recipes.report import number
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
from polyformer.training.tasks.text_to_text import measured

LONG, MOST = 240, 4000
"""Characters of a text that are shown at once, and those that can be opened."""


def text_cell(text: str) -> str:
    """Return a cell with a text; of a long text the rest is opened by a click or a key."""
    if len(text) <= LONG:
        return f'<td dir="auto">{html.escape(text)}</td>'
    rest = text[LONG:MOST] + ("…" if len(text) > MOST else "")
    return (
        f'<td dir="auto"><details><summary>{html.escape(text[:LONG])}…</summary>'
        f"{html.escape(rest)}</details></td>"
    )


def number_cell(value: float) -> str:
    """Return a cell with a number with one digit after the point."""
    return f"<td>{value:.1f}</td>"


def example_table(
    columns: Sequence[str], groups: Mapping[str, Sequence[int]], cells: Callable[[int], Sequence[str]]
) -> str:
    """Return a table of examples by group; `cells` returns the HTML of the cells of an example."""
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in columns)
    bodies = (
        f'<tbody><tr><th scope="rowgroup" colspan="{len(columns)}">{html.escape(name)}</th></tr>\n'
        + "".join(f"<tr>{''.join(cells(number))}</tr>\n" for number in numbers)
        + "</tbody>"
        for name, numbers in groups.items()
        if numbers
    )
    content = f"<thead><tr>{head}</tr></thead>\n{''.join(bodies)}"
    return f'<div class="wide"><table class="examples">{content}</table></div>'


NONE = "(no answer)"


def answers(held: HeldOutRows) -> str:
    """Return questions with their answers and the predictions, by F1."""
    rows = held.first
    predicted = held.task.answer(held.model, rows)
    truths = [row["answers"]["text"] for row in rows]
    scores = [100 * f1(*pair) for pair in zip(predicted, truths, strict=True)]

    def cells(index: int) -> list[str]:
        right = " | ".join(dict.fromkeys(truths[index])) or NONE
        texts = rows[index]["question"], right, predicted[index] or NONE, rows[index]["context"]
        return [*map(text_cell, texts), number_cell(scores[index])]

    names = [name for name in ("exact_match", "f1") if name in held.scores]
    corpus = ", ".join(f"{name.replace('_', ' ')} {number(held.scores[name])}" for name in names)
    whole = f"All validation rows: {corpus}. " if corpus else ""
    text = f"{whole}Answers to {held.extent} validation questions. {rule('F1')}"
    columns = ["question", "answer", "prediction", "context", "F1"]
    return section("Examples", text, example_table(columns, ranked(scores), cells))


def choices(held: HeldOutRows) -> str:
    """Return questions with the probability of each choice, by the probability of the right choice."""
    rows = held.first
    shares = held.task.choose(held.model, rows)
    right = [right_choice(row["label"], row["choices"], held.task.config.first_number) for row in rows]
    scores = [100 * each[place] for each, place in zip(shares, right, strict=True)]

    def cells(index: int) -> list[str]:
        chosen = max(range(len(shares[index])), key=shares[index].__getitem__)
        listed = "".join(
            f'<li dir="auto">{html.escape(choice[:400])} ({share:.2f}'
            f"{', right' if place == right[index] else ''}{', chosen' if place == chosen else ''})</li>"
            for place, (choice, share) in enumerate(zip(rows[index]["choices"], shares[index]))
        )
        return [text_cell(rows[index]["text"]), f"<td><ul>{listed}</ul></td>", number_cell(scores[index])]

    text = f"The choices for {held.extent} validation questions. {rule('probability of the right choice')}"
    columns = ["text", "choices and their probabilities", "right choice, %"]
    return section("Examples", text, example_table(columns, ranked(scores), cells))


def numbers(held: HeldOutRows) -> str:
    """Return pairs of texts with their numbers and the predicted ones, by the distance between the two."""
    rows = held.first
    predicted = held.task.predict(held.model, *([row[name] for row in rows] for name in ("text", "pair")))
    right = [float(str(row["label"])) for row in rows]
    scores = [-abs(guess - truth) for guess, truth in zip(predicted, right, strict=True)]

    def cells(index: int) -> list[str]:
        texts = (text_cell(rows[index][name]) for name in ("text", "pair"))
        return [*texts, *(f"<td>{value:.4g}</td>" for value in (right[index], predicted[index]))]

    text = f"Predictions for {held.extent} validation rows. {rule('closeness to the right number')}"
    table = example_table(["text", "pair", "right", "prediction"], ranked(scores), cells)
    return section("Examples", text, table)


IMAGES = 6


def completed_images(held: HeldOutRows) -> str:
    """Return the first validation images in rows, a row for each of `pictures` of the task."""
    task = held.task
    parts = []
    for name, images in zip(task.pictures, task.complete(held.model, held.rows, IMAGES, held.seed)):
        figures = []
        for place, levels in enumerate(images.numpy(), 1):
            light = np.where(levels < 0, 255, levels * 255 // (task.levels - 1)).astype(np.uint8)
            pixels = light.reshape(*light.shape[:2], -1)
            figures.append(figure(image_element(pixels, f"{name} {place}"), f"{name} {place}"))
        parts.append(f'<div class="mistaken">{"".join(figures)}</div>')
    text = f"The first validation images in rows: {', '.join(task.pictures)}. Missing pixels are white."
    return section("Examples", text, *parts)


PLACES, PROMPT, NEW = 3, 48, 80
"""The number of texts, and the tokens of a text that the model reads and that it writes."""


def continued_texts(held: HeldOutRows) -> str:
    """Return beginnings of validation texts with their continuations, sampled with the seed of the run."""
    task, model = held.task, held.model
    decode, start = task.tokenizer.decode, task.start("")
    room = model.config.max_position_embeddings - len(start)
    blocks = []
    for excerpt in excerpts(task.rows.encoded(held.rows), min(PROMPT + NEW, room)):
        ids = [*map(int, excerpt)]
        known = max(1, min(PROMPT, len(ids) // 2))
        prompt, rest = decode(ids[:known]), decode(ids[known:])
        drawing = SamplingConfig(do_sample=True, temperature=0.7, top_p=0.95, seed=held.seed)
        config = GenerationConfig(max_new_tokens=max(1, min(NEW, room - known)), sampling=drawing)
        read = torch.tensor([[*start, *ids[:known]]])  # tokens, as a part of a text may have other tokens
        continuation = model.generate(read, None, config, None, decode).texts(decode)[0]
        blocks.append(
            f"<h3>Text {len(blocks) + 1}</h3>"
            f'<pre dir="auto"><b>{html.escape(prompt)}</b>{html.escape(continuation)}</pre>\n'
            f'<p class="soft">The text itself continues:</p><pre dir="auto">{html.escape(rest)}</pre>'
        )
    text = (
        f"Texts at {PLACES} evenly spaced places of the validation data. Blue is what the model has read; "
        "the rest is sampled at temperature 0.7."
    )
    return section("Examples", text, *blocks) if blocks else ""


def excerpts(documents: Sequence[Sequence[int]], length: int) -> list[Sequence[int]]:
    """Return at most `length` tokens at each of `PLACES` evenly spaced places of the documents.

    An excerpt begins with its document, unless the document is long enough to be entered at the place itself.
    """
    documents = [document for document in documents if len(document) > 1]
    ends = [*accumulate(map(len, documents))]
    chosen = {}
    for place in range(PLACES if ends else 0):
        at = place * ends[-1] // PLACES
        number = next(number for number, end in enumerate(ends) if at < end)
        document = documents[number]
        inside = at - (ends[number] - len(document))
        start = inside if inside + length <= len(document) else 0
        chosen.setdefault((number, start), document[start : start + length])
    return list(chosen.values())


OUTSIDE = "O"
"""The tag of words outside of every entity, which is not written out."""


def tagged_sentences(held: HeldOutRows) -> str:
    """Return sentences with right and wrong tags; those with most wrong tags have the lowest score."""
    rows = [row for row in held.first if row["tokens"]]
    predicted = held.task.tag(held.model, [row["tokens"] for row in rows])
    scores = [100 * sum(map(str.__eq__, tags, row["tags"])) / len(tags) for row, tags in zip(rows, predicted)]

    def cells(number: int) -> list[str]:
        row = rows[number]
        words = tagged_words(row["tokens"], row["tags"], predicted[number])
        return [f'<td class="tagged" dir="auto">{words}</td>', number_cell(scores[number])]

    text = (
        f"The tags that the model gives to the words of {held.extent} validation sentences: right ones, and "
        f"wrong ones with the right tag behind ≠. {rule('share of right tags')}"
    )
    table = example_table(["sentence", "right tags, %"], ranked(scores), cells)
    return section("Examples", text, table)


def tagged_words(words: Sequence[str], right: Sequence[str], predicted: Sequence[str]) -> str:
    """Return the words as HTML, each with its tag; a word that is and was found outside has none."""
    return " ".join(_word(*each) for each in zip(words, right, predicted, strict=True))


def _word(word: str, right: str, tag: str) -> str:
    shown = f"<bdi>{html.escape(word)}</bdi>"
    if tag == right:
        return (
            shown
            if tag == OUTSIDE
            else f'<span class="right">{shown}<small>{html.escape(tag)}</small></span>'
        )
    said = f"{html.escape(tag)} ≠ {html.escape(right)}"
    return f'<span class="wrong">{shown}<small>{said}</small></span>'


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
    for name, rows in held.task.rows.grouped(held.rows).items():
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
