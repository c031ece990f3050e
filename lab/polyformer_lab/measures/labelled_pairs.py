"""Pairs of labelled texts: which of the two has the second label."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyformer.core.files import atomic_write
from polyformer_lab.cells import preparation
from polyformer_lab.measures.labelled import TEST, TRAIN, labelled, read_texts

PairOfTexts = tuple[str, str, str]
"""Two texts, and "0" or "1" for the place of the text with label 1."""


@preparation
def labelled_pairs(folder: Path, vocabulary: int, sets: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the sets as `labelled` does, and the pairs of each into a folder with the ending "-pairs".

    Args:
        folder: the output folder.
        vocabulary: the number of tokens of each tokenizer.
        sets: by name the arguments of `labelled.chosen`.
    """
    labelled(folder, vocabulary, sets)
    for name in sets:
        out = folder / f"{name}-pairs"
        out.mkdir()
        for file in (TRAIN, TEST):
            rows = opposites(read_texts(folder / name / file))
            lines = ["text\tpair\tlabel", *map("\t".join, rows)]
            atomic_write(out / file, ("\n".join(lines) + "\n").encode())


def opposites(rows: Sequence[tuple[str, str]]) -> list[PairOfTexts]:
    """Return pairs of a text with label 0 and a text with label 1, in both orders equally often.

    Each text of the less frequent label is in a pair of each order, with different partners.
    """
    by_label = [[text for text, own in rows if own == label] for label in "01"]
    count = min(map(len, by_label))
    zeros, ones = (texts[:count] for texts in by_label)
    later = [*ones[1:], *ones[:1]]
    pairs = zip(zip(ones, zeros, "0" * count), zip(zeros, later, "1" * count))
    return [pair for both in pairs for pair in both]
