"""Pairs of question and sentence from a SQuAD file, as in QNLI: does the sentence contain the answer?

Every question makes two pairs, so that both labels are equally frequent:

    entailment       the sentence of the paragraph that contains the first answer
    not_entailment   of the sentences without the answer, the sentence that shares most words with the
                     question, so that shared words do not reveal the label

Questions without an answer, with an answer across several sentences, or of a paragraph without another
sentence make no pair. A sentence ends after . ! or ? before white space. Source: Wang et al. 2019 (GLUE),
section 3.3, which uses all sentences and then removes those that share few words with the question.
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
    """Yield {article, question, sentence, label}: two pairs per question, if it makes pairs."""
    for row in read_squad(path):
        for label, sentence in question_sentences(row["question"], row["context"], row["answers"]).items():
            yield {
                "article": row["article"],
                "question": row["question"],
                "sentence": sentence,
                "label": label,
            }


def question_sentences(question: str, context: str, answers: dict[str, list[Any]]) -> dict[str, str]:
    """Return a sentence for each label; {} unless there are both."""
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
    """Yield the start of each sentence, and the character after its end."""
    start = 0
    for gap in [*END.finditer(text), None]:
        stop = len(text) if gap is None else gap.start()
        if text[start:stop].strip():
            yield start, stop
        start = len(text) if gap is None else gap.end()
