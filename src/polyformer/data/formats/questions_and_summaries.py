"""Questions and articles: rows, and the metrics of answers and summaries.

In SQuAD's format a row is {question, context, answers} with answers {text: [...], answer_start: [...]}: human
answers, and the position in the context where each begins; both lists are empty for questions without an
answer. Data sets of the hub have the same columns.

Source: Rajpurkar et al. 2016 (SQuAD 1.1), section 6.1; Rajpurkar et al. 2018 (SQuAD 2.0), for no answer.

WikiText's articles have their first paragraph as summary of the rest:

    source   the paragraphs after the first, a line each, without headings
    target   the first paragraph

Articles without a second paragraph make no row. Similar to Liu et al. 2018, section 2.1, where the lead of an
article is generated from its sources. ROUGE counts the words, pairs of words and subsequences that two texts
share (Lin 2004), by rouge-score.
"""

import re
import string
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from polyformer.core.errors import InputError
from polyformer.core.imports import needs_extra
from polyformer.core.parsing import parse_json
from polyformer.core.ranges import JSON_BYTES
from polyformer.data.rows.structured import END, split_sentences
from polyformer.data.sources.files import opened

Row = dict[str, Any]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_MARKS = str.maketrans("", "", string.punctuation)


def read_squad(path: Path, header: object = None) -> Iterator[Row]:
    """Yield {id, article, question, context, answers} for the questions of a SQuAD JSON file, in order.

    The version may be 1.1 or 2.0. article: its title, or its number if it has no title.
    """
    with opened(path) as file:
        try:
            articles = parse_json(file.read(JSON_BYTES + 1), path, dict)["data"]
            paragraphs = [
                (str(article.get("title", number)), paragraph)
                for number, article in enumerate(articles, 1)
                for paragraph in article["paragraphs"]
            ]
            for title, paragraph in paragraphs:
                for asked in paragraph["qas"]:
                    answers = asked["answers"]
                    yield {
                        "id": asked["id"],
                        "article": title,
                        "question": asked["question"],
                        "context": paragraph["context"],
                        "answers": {
                            "text": [answer["text"] for answer in answers],
                            "answer_start": [answer["answer_start"] for answer in answers],
                        },
                    }
        except (KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"{path}: not a file of SQuAD: expected data > paragraphs > context, qas > question, answers "
                f"({type(error).__name__}: {error})"
            ) from error


def are_answers(value: object) -> bool:
    """Return whether `value` is {text: [...], answer_start: [...]} with lists of equal length."""
    if not isinstance(value, dict) or not {"text", "answer_start"} <= value.keys():
        return False
    texts, starts = value["text"], value["answer_start"]
    return (
        isinstance(texts, list)
        and isinstance(starts, list)
        and len(texts) == len(starts)
        and all(isinstance(text, str) for text in texts)
        and all(isinstance(start, int) for start in starts)
    )


def normal_form(text: str) -> str:
    """Return the normal form of an answer: lower case, no punctuation, no English article, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_MARKS)).split())


def exact_match(answer: str, truths: Sequence[str]) -> float:
    """Return 1 if the answer is in `truths` in normal form, or if both are empty; otherwise 0."""
    return float(any(normal_form(answer) == normal_form(truth) for truth in _accepted(truths)))


def f1(answer: str, truths: Sequence[str]) -> float:
    """Return the F1 of the answer's words (precision and recall), for the truth with the largest F1."""
    return max(_f1(normal_form(answer).split(), normal_form(truth).split()) for truth in _accepted(truths))


def _accepted(truths: Sequence[str]) -> list[str]:
    """Return the truths that are not empty in normal form, or an empty truth if there are none."""
    return [truth for truth in truths if normal_form(truth)] or [""]


def _f1(guess: list[str], truth: list[str]) -> float:
    if not guess or not truth:
        return float(guess == truth)
    both = sum((Counter(guess) & Counter(truth)).values())
    return 2 * both / (len(guess) + len(truth))


ENTAILMENT, NOT_ENTAILMENT = "entailment", "not_entailment"
_WORD = re.compile(r"\w+")


def read_qnli(path: Path, header: object = None) -> Iterator[Row]:
    """Yield {article, question, sentence, label}: as in QNLI, does the sentence contain the answer?

    Every question makes two pairs, so that both labels are equally frequent:

        entailment       the sentence of the paragraph that contains the first answer
        not_entailment   of the sentences without the answer, the sentence that shares most words with the
                         question, so that shared words do not reveal the label

    Questions without an answer, with an answer across several sentences, or of a paragraph without another
    sentence make no pair. A sentence ends after . ! or ? before white space. Source: Wang et al. 2019 (GLUE),
    section 3.3, which uses all sentences and then removes those that share few words with the question.
    """
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
