"""Articles and summaries: WikiText's articles, with the first paragraph as the summary of the rest.

    source   the paragraphs after the first, a line each, without headings
    target   the first paragraph

Articles without a second paragraph make no row. Similar to Liu et al. 2018, section 2.1, where the lead of an
article is generated from its sources.
"""

import re

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
