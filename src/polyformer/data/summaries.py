"""Articles and summaries, WikiText's articles with their first paragraph as summary of the rest; and ROUGE.

    source   the paragraphs after the first, a line each, without headings
    target   the first paragraph

Articles without a second paragraph make no row. Similar to Liu et al. 2018, section 2.1, where the lead of an
article is generated from its sources. ROUGE counts the words, pairs of words and subsequences that two texts
share (Lin 2004), by rouge-score.
"""

import re
from collections.abc import Sequence
from typing import Any

from polyformer.core.optional_packages import needs_extra
from polyformer.data.structured import split_sentences

Row = dict[str, str]

HEADING = re.compile(r"=( =)* [^=\s].* =( =)*")


def summary_row(article: str) -> Row | None:
    """Return {source, target} of an article, or None if it has fewer than two paragraphs."""
    lines = (line.strip() for line in article.splitlines())
    paragraphs = [line for line in lines if line and not HEADING.fullmatch(line)]
    if len(paragraphs) < 2:
        return None
    return {"source": "\n".join(paragraphs[1:]), "target": paragraphs[0]}


def lead(text: str, sentences: int = 3) -> str:
    """Return the first sentences of a text, the usual baseline for summaries (See et al. 2017, section 6)."""
    return " ".join(split_sentences(text)[:sentences])


KINDS = "rouge1", "rouge2", "rougeL"
UNKNOWN = "<unk>"
"""The token of rare words in WikiText, which does not count as a shared word."""


class RougeTokenizer:
    """Words of any language, in lower case: the package's tokenizer keeps only a to z and digits."""

    def tokenize(self, text: str) -> list[str]:
        """Return runs of letters and digits, and every other character that is no space."""
        return re.findall(r"\w+|[^\w\s]", text.lower())


def scorer(*kinds: str) -> Any:
    """Return the package's scorer of these kinds; raises `InputError` if it is not installed."""
    with needs_extra("rouge", "ROUGE: it needs rouge-score"):
        from rouge_score.rouge_scorer import RougeScorer
    return RougeScorer([*kinds], tokenizer=RougeTokenizer())


def rouge(texts: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Return the F1 of each of `KINDS`, the mean over the texts, from 0 to 100.

    Words are not stemmed, and `UNKNOWN` is ignored.
    """
    scoring = scorer(*KINDS)
    pairs = zip(references, texts, strict=True)
    scores = [scoring.score(*(text.replace(UNKNOWN, " ") for text in pair)) for pair in pairs]
    return {kind: 100 * sum(score[kind].fmeasure for score in scores) / len(scores) for kind in KINDS}
