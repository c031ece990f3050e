"""Exact scores of a generated text, as in RULER: the answers that it contains, regardless of case."""

from collections.abc import Sequence


def match_all(text: str, answers: Sequence[str]) -> float:
    """Return the share of the answers that the text contains."""
    return sum(answer.lower() in text.lower() for answer in answers) / len(answers)


def match_any(text: str, answers: Sequence[str]) -> float:
    """Return 1 if the text contains any of the answers, otherwise 0: for several wordings of one answer."""
    return float(any(answer.lower() in text.lower() for answer in answers))
