"""Question and sentence: does the sentence hold the answer? Pairs made from a file of SQuAD, as QNLI's were.

Of every question two pairs, so that both labels are equally frequent:

    entailment       the sentence of the paragraph that the first answer lies in
    not_entailment   of the others that do not hold it, the one with most of the question's words, so that
                     sharing words does not tell the label

Questions without an answer, with an answer over several sentences, or of a paragraph without another
sentence make no pair. A sentence ends behind . ! or ? before white space. Source: Wang et al. 2019 (GLUE),
section 3.3, where all sentences are taken and those with few of the question's words left out again.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from polyformer.data.squad import read_squad
from polyformer.data.structured import END

Row = dict[str, Any]

ENTAILMENT, NOT_ENTAILMENT = "entailment", "not_entailment"
_WORD = re.compile(r"\w+")


def read_qnli(path: Path, header: object = None) -> Iterator[Row]:
    """{article, question, sentence, label}: two pairs of each question that makes some."""
    for row in read_squad(path):
        for label, sentence in question_sentences(row["question"], row["context"], row["answers"]).items():
            yield {
                "article": row["article"],
                "question": row["question"],
                "sentence": sentence,
                "label": label,
            }


def question_sentences(question: str, context: str, answers: dict[str, list[Any]]) -> dict[str, str]:
    """A sentence for each label; none where there are not both."""
    spans = list(sentence_spans(context))
    if not answers["text"]:
        return {}
    answer, start = answers["text"][0], answers["answer_start"][0]
    right = [context[a:b] for a, b in spans if a <= start and start + len(answer) <= b]
    words = {*_WORD.findall(question.lower())}
    others = [context[a:b] for a, b in spans if answer.lower() not in context[a:b].lower()]
    if not right or not others:
        return {}
    near = max(others, key=lambda sentence: len(words & {*_WORD.findall(sentence.lower())}))
    return {ENTAILMENT: right[0], NOT_ENTAILMENT: near}


def sentence_spans(text: str) -> Iterator[tuple[int, int]]:
    """The first character of each sentence, and the one behind its last."""
    start = 0
    for gap in [*END.finditer(text), None]:
        stop = len(text) if gap is None else gap.start()
        if text[start:stop].strip():
            yield start, stop
        start = len(text) if gap is None else gap.end()
