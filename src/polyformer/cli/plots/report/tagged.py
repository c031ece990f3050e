"""Examples of tagging: sentences with their words coloured by right and wrong tags."""

import html
from collections.abc import Sequence

from polyformer.cli.plots.report.held import HeldOutRows, ranked, rule
from polyformer.cli.plots.report.page import section
from polyformer.cli.plots.report.texts import example_table, number_cell

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
