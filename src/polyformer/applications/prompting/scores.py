"""Metrics of answers."""

from collections import Counter
from collections.abc import Sequence

from polyformer.data.squad import exact_match, f1


def choice_metrics(answers: Sequence[str], targets: Sequence[str]) -> dict[str, float]:
    """Return accuracy, f1_macro and majority.

    f1_macro is the mean F1 over the targets. majority is the share of the most frequent target, the accuracy
    of always answering with it.
    """
    right = Counter(target for answer, target in zip(answers, targets) if answer == target)
    guessed, true = Counter(answers), Counter(targets)
    names = {*guessed, *true}
    return {
        "accuracy": right.total() / len(targets),
        "f1_macro": sum(2 * right[name] / (guessed[name] + true[name]) for name in names) / len(names),
        "majority": max(true.values()) / len(targets),
        "questions": len(targets),
    }


def text_metrics(answers: Sequence[str], targets: Sequence[str]) -> dict[str, float]:
    """Return exact_match and f1 of words as in SQuAD: without case, punctuation and articles."""
    pairs = list(zip(answers, targets, strict=True))
    return {
        "exact_match": sum(exact_match(answer, [target]) for answer, target in pairs) / len(pairs),
        "f1": sum(f1(answer, [target]) for answer, target in pairs) / len(pairs),
        "questions": len(pairs),
    }
