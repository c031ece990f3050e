"""ROUGE-L of two texts: F1 of their longest common subsequence of words (Lin 2004)."""

from polyformer.data.summaries import RougeTokenizer, scorer


class RougeL:
    """ROUGE-L by the package rouge-score."""

    def __init__(self) -> None:
        self.scorer = scorer("rougeL")

    def __call__(self, target: str, text: str) -> float:
        """Return ROUGE-L from 0 to 1; 1 if neither text has a word."""
        if not RougeTokenizer().tokenize(target) and not RougeTokenizer().tokenize(text):
            return 1.0
        return self.scorer.score(target, text)["rougeL"].fmeasure
