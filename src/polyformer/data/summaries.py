"""An article and its summary: WikiText's articles, the first paragraph being what the rest is to be told in.

    source   the paragraphs behind the first, a line each; headings are left out
    target   the first paragraph

Articles without a second paragraph make no row. After Liu et al. 2018, section 2.1, where the lead of an
article is written from its sources.
"""

import re

from polyformer.data.structured import split_sentences

Row = dict[str, str]

HEADING = re.compile(r"=( =)* [^=\s].* =( =)*")


def summary_row(article: str) -> Row | None:
    """{source, target} of an article; None where it has fewer than two paragraphs."""
    lines = (line.strip() for line in article.splitlines())
    paragraphs = [line for line in lines if line and not HEADING.fullmatch(line)]
    if len(paragraphs) < 2:
        return None
    return {"source": "\n".join(paragraphs[1:]), "target": paragraphs[0]}


def lead(text: str, sentences: int = 3) -> str:
    """The first sentences of a text: what summaries are set beside (See et al. 2017, section 6)."""
    return " ".join(split_sentences(text)[:sentences])
