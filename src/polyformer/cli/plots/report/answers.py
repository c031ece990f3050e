"""Examples of question answering, multiple choice and regression: right answers and predictions."""

import html

from polyformer.cli.plots.report.held import HeldOutRows, ranked, rule
from polyformer.cli.plots.report.page import section
from polyformer.cli.plots.report.texts import example_table, number_cell, text_cell
from polyformer.data.formats.columns import right_choice
from polyformer.data.formats.questions_and_summaries import f1
from polyformer.training.recipes.report import number

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
