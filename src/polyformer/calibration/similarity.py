"""ROUGE-L of two texts: F1 of their longest common subsequence of words (Lin 2004)."""

import re
from typing import Any

from polyformer.core.errors import InputError


class Words:
    """Words of any language, in lower case: the package's own tokenizer keeps a to z and digits alone."""

    def tokenize(self, text: str) -> list[str]:
        """Runs of letters and digits, and every other character that is no space."""
        return re.findall(r"\w+|[^\w\s]", text.lower())


class RougeL:
    """By the package rouge-score."""

    def __init__(self) -> None:
        try:
            from rouge_score.rouge_scorer import RougeScorer
        except ImportError as error:
            raise InputError(
                f"calibrate: it needs rouge-score; pip install 'polyformer[calibrate]' ({error})"
            ) from error
        self.scorer: Any = RougeScorer(["rougeL"], tokenizer=Words())

    def __call__(self, target: str, text: str) -> float:
        """From 0 to 1; 1 where neither has a word."""
        if not Words().tokenize(target) and not Words().tokenize(text):
            return 1.0
        return self.scorer.score(target, text)["rougeL"].fmeasure
