"""Published data sets in their files, with their metrics: GLUE, SuperGLUE, XNLI, SQuAD, WikiText's articles.

A format such as `glue-cola` or `superglue-boolq` reads a file of the published archive and yields the columns
of a task: text and label, text, pair and label, and so on. `published_in` recognizes the folder of a data
set by its name and its files. The published test files of GLUE and SuperGLUE have no labels and are not read.

In SQuAD's format a row is {question, context, answers} with answers {text: [...], answer_start: [...]}: human
answers, and the position in the context where each begins; both lists are empty for questions without an
answer. Data sets of the hub have the same columns.

WikiText's articles have their first paragraph as summary of the rest:

    source   the paragraphs after the first, a line each, without headings
    target   the first paragraph

Articles without a second paragraph make no row. Similar to Liu et al. 2018, section 2.1, where the lead of an
article is generated from its sources. ROUGE counts the words, pairs of words and subsequences that two texts
share (Lin 2004), by rouge-score.

Sources: Wang et al. 2019 (GLUE), table 1; Wang et al. 2019 (SuperGLUE), table 1; Conneau et al. 2018 (XNLI);
Rajpurkar et al. 2016 (SQuAD 1.1), section 6.1; Rajpurkar et al. 2018 (SQuAD 2.0), for no answer.

Deviations: ReCoRD is read as questions with an answer in the passage, so that any span can be an answer and
not only its entities. The diagnostic sets have no training data and are not read.
"""

import dataclasses
import functools
import re
import string
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyformer.core.errors import InputError
from polyformer.core.imports import needs_extra
from polyformer.core.parsing import parse_json
from polyformer.core.ranges import JSON_BYTES
from polyformer.data.formats.tables import Header, Row, read_jsonl, read_tsv
from polyformer.data.rows.structured import END, split_sentences
from polyformer.data.sources.files import lines_of, opened, plain_name

Convert = Callable[[Row], Iterator[Row]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A data set: its task with options, and the names of its folder and files."""

    task: str
    convert: Convert
    folder: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of the task
    path: str = "train.tsv"
    validation: str = "dev.tsv"
    test: str | None = None
    header: tuple[str, ...] | None = None
    skips_short: bool = False  # the published file has some lines with missing columns


def _columns(**roles: str) -> Convert:
    """Return a function that renames columns: role=column."""

    def convert(row: Row) -> Iterator[Row]:
        chosen = {role: row[column] for role, column in roles.items()}
        yield {**chosen, "label": _spelled(chosen["label"])}

    return convert


def _pair(first: str, second: str, label: str = "label") -> Convert:
    return _columns(text=first, pair=second, label=label)


def _spelled(value: object) -> object:
    """Return a label that is a number or a truth value as its JSON text."""
    return str(value).lower() if isinstance(value, int) else value


def _copa(row: Row) -> Iterator[Row]:
    asked = {"cause": "What was the cause?", "effect": "What happened as a result?"}[row["question"]]
    choices = [row["choice1"], row["choice2"]]
    yield {"text": f"{row['premise']} {asked}", "choices": choices, "label": row["label"]}


def _multirc(row: Row) -> Iterator[Row]:
    for question in row["passage"]["questions"]:
        for answer in question["answers"]:
            yield {
                "text": row["passage"]["text"],
                "pair": f"{question['question']} {answer['text']}",
                "label": _spelled(answer["label"]),
                "group": f"{row['idx']}-{question['idx']}",
            }


def _record(row: Row) -> Iterator[Row]:
    for query in row["qas"]:
        answers = query["answers"]
        yield {
            "question": query["query"],
            "context": row["passage"]["text"],
            "answers": {
                "text": [answer["text"] for answer in answers],
                "answer_start": [answer["start"] for answer in answers],
            },
        }


def _wic(row: Row) -> Iterator[Row]:
    yield {
        "text": f"{row['word']}: {row['sentence1']}",
        "pair": row["sentence2"],
        "label": _spelled(row["label"]),
    }


def _wsc(row: Row) -> Iterator[Row]:
    """Mark the pronoun by asterisks, as T5 does; the pair is the noun that it may mean."""
    words, target = row["text"].split(), row["target"]
    start, length = target["span2_index"], len(target["span2_text"].split())
    words[start] = f"*{words[start]}"
    words[start + length - 1] += "*"
    yield {"text": " ".join(words), "pair": target["span1_text"], "label": _spelled(row["label"])}


def _xnli(row: Row) -> Iterator[Row]:
    """Read XNLI's own file, or a translation of MultiNLI (premise, hypo, label)."""
    if "hypo" in row:
        label = {"contradictory": "contradiction"}.get(row["label"], row["label"])
        yield {"text": row["premise"], "pair": row["hypo"], "label": label, "group": "train"}
    else:
        yield {
            "text": row["sentence1"],
            "pair": row["sentence2"],
            "label": row["gold_label"],
            "group": row["language"],
        }


def _superglue(folder: str, convert: Convert, task: str = "classify_pair", **options: Any) -> Benchmark:
    path, validation = "train.jsonl", "val.jsonl"
    return Benchmark(
        task=task, convert=convert, folder=folder, options=options, path=path, validation=validation
    )


def _glue(folder: str, convert: Convert, task: str = "classify_pair", **options: Any) -> Benchmark:
    return Benchmark(task=task, convert=convert, folder=folder, **options)


_COLA = {"header": ("source", "label", "mark", "text"), "options": {"metrics": ["matthews"]}}
_MNLI = {"validation": "dev_matched.tsv", "test": "dev_mismatched.tsv"}

BENCHMARKS: Mapping[str, Benchmark] = {
    "glue-cola": _glue("CoLA", _columns(text="text", label="label"), "classify", **_COLA),
    "glue-sst2": _glue("SST-2", _columns(text="sentence", label="label"), "classify"),
    "glue-mrpc": _glue("MRPC", _pair("#1 String", "#2 String", "Quality"), options={"metrics": ["f1"]}),
    "glue-stsb": _glue("STS-B", _pair("sentence1", "sentence2", "score"), "regress_pair"),
    "glue-qqp": _glue(
        "QQP", _pair("question1", "question2", "is_duplicate"), options={"metrics": ["f1"]}, skips_short=True
    ),
    "glue-mnli": _glue("MNLI", _pair("sentence1", "sentence2", "gold_label"), **_MNLI),
    "glue-qnli": _glue("QNLI", _pair("question", "sentence")),
    "glue-rte": _glue("RTE", _pair("sentence1", "sentence2")),
    "glue-wnli": _glue("WNLI", _pair("sentence1", "sentence2")),
    "superglue-boolq": _superglue("BoolQ", _pair("passage", "question")),
    "superglue-cb": _superglue("CB", _pair("premise", "hypothesis")),
    "superglue-copa": _superglue("COPA", _copa, "choose"),
    "superglue-multirc": _superglue("MultiRC", _multirc, "classify_grouped", metrics=["f1"]),
    "superglue-record": _superglue("ReCoRD", _record, "qa"),
    "superglue-rte": _superglue("RTE", _pair("premise", "hypothesis")),
    "superglue-wic": _superglue("WiC", _wic),
    "superglue-wsc": _superglue("WSC", _wsc),
    "xnli": Benchmark(
        task="classify_grouped",
        convert=_xnli,
        folder="XNLI",
        options={"group_metrics": ["accuracy_by_group"]},
        path="multinli.train.en.tsv",
        validation="xnli.dev.tsv",
        test="xnli.test.tsv",
    ),
}
"""The data sets by the name of their format."""


def read_benchmark(name: str, path: Path, header: Header = None) -> Iterator[Row]:
    """Yield the rows of the data set `name`; raises `InputError` for a file with other columns."""
    benchmark = BENCHMARKS[name]
    for number, row in enumerate(_raw(benchmark, path), 1):
        try:
            yield from benchmark.convert(row)
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise InputError(
                f"{path}, row {number}: expected a labelled row of {benchmark.folder} as published, got "
                f"{', '.join(map(str, row)):.200} ({type(error).__name__}: {error}); the test files of GLUE "
                "and SuperGLUE have no labels"
            ) from error


BENCHMARK_READERS = {name: functools.partial(read_benchmark, name) for name in BENCHMARKS}
"""A reader for each data set."""


def published_in(folder: Path) -> tuple[str, dict[str, str]] | None:
    """Return the format of the data set in `folder` and its sources by role; None for another folder.

    The folder has the published name, and its first file has the published columns.
    """
    for name, benchmark in BENCHMARKS.items():
        files = {"path": benchmark.path, "validation": benchmark.validation, "test": benchmark.test}
        sources = {role: str(folder / file) for role, file in files.items() if file}
        if folder.resolve().name == benchmark.folder and all(
            Path(source).is_file() for source in sources.values()
        ):
            try:
                next(read_benchmark(name, Path(sources["path"])), None)
            except InputError:
                continue
            return name, sources
    return None


def _raw(benchmark: Benchmark, path: Path) -> Iterator[Row]:
    if plain_name(path.name).endswith(".jsonl"):
        return read_jsonl(path)
    if benchmark.skips_short:
        return _whole_rows(path)
    return read_tsv(path, benchmark.header)


def _whole_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a table without the lines that have too few fields, as GLUE's own baselines do."""
    with opened(path) as file:
        lines = (line.rstrip("\r\n").split("\t") for line in lines_of(file, path))
        names = next(lines, [])
        yield from (dict(zip(names, fields)) for fields in lines if len(fields) >= len(names))


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
