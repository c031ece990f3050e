"""Few-shot prompts: questions after demonstrations, answered by a causal model without training on them.

    demonstration  separator  demonstration  separator  question        all by the same template

Questions and demonstrations come from files. If a question has choices, the answer is the most likely choice,
otherwise the generated text. Source: Brown et al. 2020 (GPT-3), section 2.4.

    score(answer) = log P(answer | prompt) = sum over the answer's tokens of log P(token | all before)

optionally divided by its number of tokens or bytes, because a longer answer is less probable due to its
length. A prompt and its answers are tokenized together. The answers begin at the first token in which any of
them differs from the prompt, so that all answers to a question are scored after the same tokens. Brown et al.
2020, section 2.4.

`log_likelihoods_definition` reads every text separately. `log_likelihoods` reads the common prefix of all
texts (the demonstrations) once, continues from that state in batches, and reads texts that differ only in
their last token (answers of one token) once.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from polyformer.core.errors import InputError, quote
from polyformer.core.modules import evaluating
from polyformer.data import by_tokens
from polyformer.data.formats.published import exact_match, f1
from polyformer.data.formats.readers import read_lines
from polyformer.data.sources.origins import existing_file, open_source, source_name
from polyformer.models.architectures import Transformer
from polyformer.models.generation import Decode, GenerationConfig

__all__ = [
    "Example",
    "Sources",
    "Template",
    "choice_metrics",
    "choose_answers",
    "read_examples",
    "split_examples",
    "text_metrics",
    "write_answers",
]

ROLES = "input", "target", "choices"
BETWEEN = "|"
"""Separates the choices of a row that are given as one text, as in CSV files."""


@dataclass(frozen=True)
class Example:
    """A question, its answer if known, and the answers to choose from, if any."""

    input: str
    target: str | None = None
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sources:
    """Options for reading files.

    format, header: as for every source (`polyformer.data`). columns: names of the columns of input, target
    and choices if they differ from these. words: replacements of the targets in a file. choices: choices of
    rows that have none.
    """

    format: str | None = None
    header: tuple[str, ...] | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)
    choices: tuple[str, ...] = ()


def read_examples(path: str, sources: Sources) -> list[Example]:
    """Read the rows of a file. A plain text has a question in each line, and its answer after a tab.

    Raises `InputError` that names the row: for a question without text, a target that is not among the
    choices, a single choice, or a repeated choice.
    """
    rows = list(_rows(path, sources))
    if not rows:
        raise InputError(f"{source_name(path)}: empty; there is no question in it")
    return [_example(row, f"{path}, row {number}", sources) for number, row in enumerate(rows, 1)]


def split_examples(
    rows: Sequence[Example], others: Sequence[Example] | None, shots: int, limit: int | None, seed: int
) -> tuple[list[Example], list[Example]]:
    """Return (demonstrations, questions), both sampled with `seed`.

    More shots extend the same demonstrations. Demonstrations are rows with a target, from `others` if given,
    else from `rows`; they never contain a question. At most `limit` questions are chosen, in the order of the
    file; if there are enough rows, they do not depend on the number of shots. Raises `InputError` for fewer
    rows than shots.
    """
    order = np.random.default_rng(seed).permutation(len(rows)).tolist()
    asked = {row.input for row in rows}
    if others is None:
        candidates = [row for row in order[::-1] if rows[row].target is not None]
        chosen, demonstrations = candidates[:shots], [rows[row] for row in candidates[:shots]]
        repeated = {row.input for row in demonstrations}
        order = [row for row in order if row not in {*chosen} and rows[row].input not in repeated]
    else:
        drawn = np.random.default_rng(seed).permutation(len(others)).tolist()
        free = [others[row] for row in drawn if others[row].target is not None]
        candidates = [row for row in free if row.input not in asked]
        demonstrations = candidates[:shots]
    if len(demonstrations) < shots:
        raise InputError(
            f"shots: expected at most {len(candidates)}, the number of rows with a target that are not among "
            f"the questions, got {shots}; use fewer, or more rows with --examples FILE"
        )
    questions = sorted(order[:limit])
    if not questions:
        raise InputError(
            f"shots: {shots} of {len(rows)} rows leave no question; name other rows with --examples FILE"
        )
    return demonstrations, [rows[row] for row in questions]


def _rows(path: str, sources: Sources) -> Iterator[dict[str, Any]]:
    plain = sources.format is None and sources.header is None and not path.startswith("hub:")
    if not plain or Path(path.removesuffix(".gz")).suffix != ".txt":
        yield from open_source(path, "test", sources.format, sources.header)
        return
    for row in read_lines(existing_file(path)):
        question, tab, answer = row["text"].partition("\t")
        yield {"input": question, **({"target": answer} if tab else {})}


def _example(row: Mapping[str, Any], where: str, sources: Sources) -> Example:
    column = sources.columns.get("input", "input")
    if column not in row:
        raise InputError(
            f"{where}: no column {quote(column)}; it has {', '.join(map(quote, row)) or 'none'}; name the "
            "column of the question with --columns '{input: NAME}', or all columns with "
            "--header '[input, target]'"
        )
    values = {role: row.get(sources.columns.get(role, role)) for role in ROLES}
    target = values["target"]
    if isinstance(target, list | dict):
        raise InputError(f"{where}: expected a text as its target, got {quote(target)}")
    example = Example(
        _text(values["input"], where),
        None if target is None or target == "" else _worded(str(target), where, sources.words),
        _choices(values["choices"], where) or sources.choices,
    )
    if example.choices and example.target is not None and example.target not in example.choices:
        names = ", ".join(map(quote, example.choices))
        raise InputError(f"{where}: the target {quote(example.target)} is not among the choices {names:.400}")
    return replace(example, choices=checked_choices(example.choices, where))


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str | int | float) or not str(value).strip():
        raise InputError(f"{where}: expected a text as its input, got {quote(value)}")
    return str(value)


def _worded(target: str, where: str, words: Mapping[str, str]) -> str:
    if words and target not in words:
        raise InputError(f"{where}: --targets has no word for {quote(target)}")
    return words.get(target, target)


def _choices(value: Any, where: str) -> tuple[str, ...]:
    if value is None or value == "":
        return ()
    parts = value.split(BETWEEN) if isinstance(value, str) else value
    if not isinstance(parts, list) or not all(isinstance(part, str | int | float) for part in parts):
        raise InputError(
            f"{where}: expected choices as a list, or separated by {BETWEEN}, got {quote(value)}"
        )
    return tuple(str(part).strip() for part in parts)


def checked_choices(choices: tuple[str, ...], where: str) -> tuple[str, ...]:
    """Return `choices` if they are none, or two and more different texts; raise `InputError` otherwise."""
    if choices and (len({*choices}) < max(2, len(choices)) or not all(choices)):
        raise InputError(f"{where}: expected two or more different choices, got {quote(list(choices))}")
    return choices


INPUT, TARGET = "{input}", "{target}"


@dataclass(frozen=True)
class Template:
    """A template of prompts.

    form: of a demonstration, with `{input}` once and `{target}` at its end. separator: text between two.
    """

    form: str = "Input: {input}\nOutput: {target}"
    separator: str = "\n\n"

    def __post_init__(self) -> None:
        counts = self.form.count(INPUT), self.form.count(TARGET)
        if counts != (1, 1) or not self.form.endswith(TARGET):
            raise InputError(
                f"template: expected {INPUT} once and {TARGET} at the end, as in 'Q: {INPUT} A: {TARGET}', "
                f"got {quote(self.form)}"
            )

    def demonstrations(self, examples: Sequence[Example]) -> str:
        """Return the text before every question; each example must have a target."""
        return "".join(self._filled(example, str(example.target)) + self.separator for example in examples)

    def question(self, example: Example, answer: str = "") -> str:
        """Return the question with an `answer`.

        Without an answer, trailing white space is removed, because tokens at the beginning of a word include
        it.
        """
        text = self._filled(example, answer)
        return text if answer else text.rstrip()

    def _filled(self, example: Example, target: str) -> str:
        head, tail = self.form.removesuffix(TARGET).split(INPUT)
        return head + example.input + tail + target


Normalize = Literal["none", "tokens", "bytes"]

BATCH_TOKENS = 4096  # tokens per batch, including the common prefix in each row


class Continuation(NamedTuple):
    """Token ids, and the index of the first token to score; at least one token precedes it."""

    ids: list[int]
    start: int


class Score(NamedTuple):
    """Log P of the scored tokens of a row, and whether each of them was the most probable token."""

    log_p: float
    greedy: bool


@torch.no_grad()
def log_likelihoods_definition(model: Transformer, rows: Sequence[Continuation]) -> list[float]:
    """Return log P of the tokens of each row from its `start` on, by one pass per row."""
    device, scores = next(model.parameters()).device, []
    with evaluating(model):
        for ids, start in rows:
            log_p = model(torch.tensor([ids], device=device)).logits[0].double().log_softmax(-1)
            scores.append(math.fsum(float(log_p[i - 1, ids[i]]) for i in range(start, len(ids))))
    return scores


def log_likelihoods(
    model: Transformer, rows: Sequence[Continuation], batch_tokens: int = BATCH_TOKENS
) -> list[float]:
    """Return the same, reading the common prefix of the rows only once."""
    return [score.log_p for score in score_continuations(model, rows, batch_tokens)]


@torch.no_grad()
def score_continuations(
    model: Transformer, rows: Sequence[Continuation], batch_tokens: int = BATCH_TOKENS
) -> list[Score]:
    """Return the score of each row, reading the common prefix of the rows only once."""
    if not rows:
        return []
    device = next(model.parameters()).device
    shared = _shared([ids for ids, _ in rows], min(start for _, start in rows) - 1)
    inputs = [tuple(ids[shared:-1]) for ids, _ in rows]
    texts = sorted({*inputs})
    users: dict[tuple[int, ...], list[int]] = {text: [] for text in texts}
    for row, text in enumerate(inputs):
        users[text].append(row)
    scores = [Score(0.0, True)] * len(rows)
    with evaluating(model):
        state = None
        if shared:
            state = model(torch.tensor([rows[0].ids[:shared]], device=device), use_cache=True).state
        lengths = torch.tensor([[shared + len(text)] for text in texts]).numpy()
        most = max(batch_tokens, int(lengths.max()))
        for numbers in by_tokens(lengths, None, max_tokens=most):
            batch = [texts[number] for number in numbers]
            ids = torch.zeros(len(batch), max(map(len, batch)), dtype=torch.long, device=device)
            mask = torch.zeros_like(ids)
            for i, text in enumerate(batch):
                ids[i, : len(text)] = torch.tensor(text, device=device)
                mask[i, : len(text)] = 1
            before = None if state is None else state.reorder(ids.new_zeros(len(batch)))
            hidden = model(ids, mask, state=before).last_hidden_state
            for i, text in enumerate(batch):
                for row, score in _scored(model, hidden[i], users[text], rows, shared):
                    scores[row] = score
    return scores


def _scored(
    model: Transformer, hidden: Tensor, users: Sequence[int], rows: Sequence[Continuation], shared: int
) -> list[tuple[int, Score]]:
    """Return (row, score) of rows with the same input; `hidden` [T, E] begins after the prefix `shared`."""
    first = min(rows[row].start for row in users) - 1 - shared
    last = len(rows[users[0]].ids) - 1 - shared  # equal for all of these rows
    log_p = model.predictions(hidden[None, first:last])[0].double().log_softmax(-1)
    likeliest = log_p.argmax(-1).tolist()
    scores = []
    for row in users:
        ids, start = rows[row]
        pairs = [(at, ids[shared + first + at + 1]) for at in range(start - 1 - shared - first, last - first)]
        total = math.fsum(float(log_p[at, token]) for at, token in pairs)
        scores.append((row, Score(total, all(likeliest[at] == token for at, token in pairs))))
    return scores


def _shared(rows: Sequence[list[int]], most: int) -> int:
    """Return the length of the common prefix of all rows, at most `most`."""
    first, last = min(rows), max(rows)  # the prefix of the least and the greatest row is common to all
    return next((i for i in range(most) if first[i] != last[i]), most)


def continuations(
    start: Callable[[str], list[int]], context: str, template: Template, example: Example
) -> list[Continuation]:
    """Return a row for each choice of a question after the text `context`.

    `start` returns the ids of a text at the beginning of a document. Raises `InputError` if no token precedes
    the answers.
    """
    prompt = start(context + template.question(example))
    answers = [start(context + template.question(example, choice)) for choice in example.choices]
    place = _shared([prompt, *answers], min(map(len, [prompt, *answers])))
    place = min(place, *(len(answer) - 1 for answer in answers))
    if place < 1:
        raise InputError(
            f"template: no token precedes the answers to {quote(example.input)}; put more text before "
            "{target}"
        )
    return [Continuation(answer, place) for answer in answers]


def choose_answers(
    model: Transformer,
    rows: Sequence[Sequence[Continuation]],
    questions: Sequence[Example],
    normalize: Normalize = "none",
) -> list[dict[str, float]]:
    """Return the score of each choice of each question; the first maximum is the answer."""
    scores = iter(log_likelihoods(model, [row for several in rows for row in several]))
    results = []
    for several, example in zip(rows, questions, strict=True):
        sizes = {
            "none": [1] * len(several),
            "tokens": [len(row.ids) - row.start for row in several],
            "bytes": [len(choice.encode()) for choice in example.choices],
        }[normalize]
        results.append({choice: next(scores) / size for choice, size in zip(example.choices, sizes)})
    return results


def write_answers(
    model: Transformer,
    prompts: Sequence[list[int]],
    decode: Decode,
    *,
    stop: str,
    max_new_tokens: int,
    batch_tokens: int = BATCH_TOKENS,
    cache: str | None = None,
) -> list[str]:
    """Return the text after each of the `prompts` (token ids), by greedy decoding up to a stop text.

    cache: a cache policy, as in `generate`.
    """
    config = GenerationConfig(max_new_tokens=max_new_tokens, stop=(stop,) if stop else ())
    config = replace(config, cache=cache)
    return [text.strip() for text in generate_texts(model, prompts, decode, config, batch_tokens)]


def generate_texts(
    model: Transformer,
    prompts: Sequence[list[int]],
    decode: Decode,
    config: GenerationConfig,
    batch_tokens: int = BATCH_TOKENS,
) -> list[str]:
    """Return the text after each of the `prompts` (token ids), up to the stop texts of `config`.

    A batch contains prompts of similar length, and at most `batch_tokens` tokens, including the new ones and
    padding.
    """
    assert config.max_new_tokens is not None
    device, pad = next(model.parameters()).device, model.config.special.pad or 0
    texts = [""] * len(prompts)
    lengths = torch.tensor([[len(prompt) + config.max_new_tokens] for prompt in prompts]).numpy()
    for numbers in by_tokens(lengths, None, max_tokens=max(batch_tokens, int(lengths.max()))):
        batch = [prompts[number] for number in numbers]
        width = max(map(len, batch))
        ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in batch], device=device)
        real = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch])
        generated = model.generate(ids, real.to(device), config, None, decode)
        for number, text in zip(numbers, generated.texts(decode, config.stop), strict=True):
            texts[number] = text
    return texts


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
